package undo

// Follow is follow, for a request to url with a host.
func Follow(url, host, location string) string {
	return follow(&Outgoing{URL: url, Host: host}, location)
}
