package badger_test

import (
	_ "example.com/house/guard/store/badger"
	_ "example.com/house/guard/store/storetest"
)
