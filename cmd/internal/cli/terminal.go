package cli

import (
	"os"

	"golang.org/x/term"
)

// Terminal is the size of the terminal that the command writes to, if it does.
func Terminal(w any) (width, height int, is bool) {
	f, ok := w.(*os.File)
	if !ok {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(f.Fd()))
	return width, height, err == nil
}
