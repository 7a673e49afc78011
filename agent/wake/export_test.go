package wake

// ReadNames is readNames.
var ReadNames = readNames
