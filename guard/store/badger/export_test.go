package badger

const DefaultMinFree = defaultMinFree
