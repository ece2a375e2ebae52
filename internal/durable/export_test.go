package durable

var ErrChanged = errChanged
