package fingerprint

var (
	Known = known
	Words = words
)
