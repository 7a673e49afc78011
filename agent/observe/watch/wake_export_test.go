package watch

// ReadNames is readNames.
var ReadNames = readNames
