package watch

// ReadStream takes a list from a stream.
var ReadStream = read
