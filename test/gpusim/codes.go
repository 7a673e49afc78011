package gpusim

import (
	"fmt"
	"slices"
	"strings"
)

// Return is a result code of NVML. Its values are those of nvmlReturn_t.
type Return int

// The result codes that the simulator gives by itself, or on demand through a Fault.
const (
	Success               Return = 0
	Uninitialized         Return = 1
	InvalidArgument       Return = 2
	NotSupported          Return = 3
	NoPermission          Return = 4
	NotFound              Return = 6
	InsufficientSize      Return = 7
	DriverNotLoaded       Return = 9
	Timeout               Return = 10
	LibraryNotFound       Return = 12
	FunctionNotFound      Return = 13
	GPUIsLost             Return = 15
	ResetRequired         Return = 16
	OperatingSystem       Return = 17
	LibRMVersionMismatch  Return = 18
	InUse                 Return = 19
	NoMemory              Return = 20
	NoData                Return = 21
	InsufficientResources Return = 23
	VersionMismatch       Return = 25
	Unknown               Return = 999
)

// returnTexts holds for each code its name without the "NVML_" and the text that nvmlErrorString gives.
var returnTexts = map[Return][2]string{
	Success:               {"SUCCESS", "Success"},
	Uninitialized:         {"ERROR_UNINITIALIZED", "Uninitialized"},
	InvalidArgument:       {"ERROR_INVALID_ARGUMENT", "Invalid Argument"},
	NotSupported:          {"ERROR_NOT_SUPPORTED", "Not Supported"},
	NoPermission:          {"ERROR_NO_PERMISSION", "Insufficient Permissions"},
	NotFound:              {"ERROR_NOT_FOUND", "Not Found"},
	InsufficientSize:      {"ERROR_INSUFFICIENT_SIZE", "Insufficient Size"},
	DriverNotLoaded:       {"ERROR_DRIVER_NOT_LOADED", "Driver Not Loaded"},
	Timeout:               {"ERROR_TIMEOUT", "Timeout"},
	LibraryNotFound:       {"ERROR_LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"},
	FunctionNotFound:      {"ERROR_FUNCTION_NOT_FOUND", "Function Not Found"},
	GPUIsLost:             {"ERROR_GPU_IS_LOST", "GPU is lost"},
	ResetRequired:         {"ERROR_RESET_REQUIRED", "GPU requires reset"},
	OperatingSystem:       {"ERROR_OPERATING_SYSTEM", "The operating system has blocked the request."},
	LibRMVersionMismatch:  {"ERROR_LIB_RM_VERSION_MISMATCH", "RM has detected an NVML/RM version mismatch."},
	InUse:                 {"ERROR_IN_USE", "In use by another client"},
	NoMemory:              {"ERROR_MEMORY", "Insufficient Memory"},
	NoData:                {"ERROR_NO_DATA", "No data"},
	InsufficientResources: {"ERROR_INSUFFICIENT_RESOURCES", "Insufficient Resources"},
	VersionMismatch:       {"ERROR_ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"},
	Unknown:               {"ERROR_UNKNOWN", "Unknown Error"},
}

// String is the code's name as in nvml.h, without the leading "NVML_": "ERROR_IN_USE".
func (r Return) String() string {
	if t, ok := returnTexts[r]; ok {
		return t[0]
	}
	return fmt.Sprintf("ERROR_%d", int(r))
}

// Text is what nvmlErrorString says of the code: "In use by another client".
func (r Return) Text() string {
	if t, ok := returnTexts[r]; ok {
		return t[1]
	}
	return "Unknown Error"
}

// ParseReturn finds a code by its name in any case, with or without "NVML_" and "ERROR_": "in_use".
func ParseReturn(name string) (Return, error) {
	short := func(s string) string { return strings.TrimPrefix(strings.TrimPrefix(s, "NVML_"), "ERROR_") }
	want := short(strings.ToUpper(name))
	var known []string
	for r, t := range returnTexts {
		if short(t[0]) == want {
			return r, nil
		}
		known = append(known, short(t[0]))
	}
	slices.Sort(known)
	return 0, fmt.Errorf("result code %q is not known: use one of %s", name, strings.Join(known, ", "))
}
