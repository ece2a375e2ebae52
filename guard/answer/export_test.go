package answer

// Flush sends what is buffered to the client.
func (w *Writer) Flush() { w.flush() }
