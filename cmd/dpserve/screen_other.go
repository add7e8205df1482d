//go:build !unix

package main

import "os"

func isForeground(*os.File) bool { return true }

// followTerminal does nothing: this system has no signals of the terminal.
func followTerminal(*screen) {}
