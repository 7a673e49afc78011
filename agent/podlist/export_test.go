package podlist

// Read takes a list from a stream.
var Read = read
