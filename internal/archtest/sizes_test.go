package archtest

// maxLines is the most lines a file has that is not a test.
const maxLines = 500

// checkSizes holds one noun a file: what is longer than maxLines holds two.
func checkSizes(t *tree) []violation {
	var found []violation
	for _, f := range t.gos {
		if !f.test && f.lines > maxLines {
			found = append(found, violation{"size", f.path, "over 500 lines"})
		}
	}
	return found
}
