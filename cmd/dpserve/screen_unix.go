//go:build unix

package main

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// isForeground reports whether the process may draw: on its own terminal it is not in the background. The
// kernel answers 0 for a process group of another PID namespace.
func isForeground(terminal *os.File) bool {
	group, err := unix.IoctlGetInt(fd(terminal), unix.TIOCGPGRP)
	return err != nil || group == 0 || group == unix.Getpgrp()
}

// followTerminal redraws the live lines when the window has another size, and leaves the terminal to the
// shell on Ctrl-Z until the shell continues the process.
func followTerminal(s *screen) {
	sig := make(chan os.Signal, 16)
	signal.Notify(sig, unix.SIGWINCH, unix.SIGCONT)
	if !signal.Ignored(unix.SIGTSTP) {
		signal.Notify(sig, unix.SIGTSTP)
	}
	go func() {
		defer signal.Stop(sig)
		for {
			select {
			case got := <-sig:
				if got == unix.SIGTSTP {
					s.standStill(func() bool { return stopProcess(sig) })
				} else {
					s.redraw(got == unix.SIGCONT)
				}
			case <-s.done:
				return
			}
		}
	}()
}

// stopProcess stops the process until SIGCONT, as SIGTSTP does by default. Without a shell that gave the
// process a group of its own nobody could continue it: then it returns false at once, as the signal has no
// effect by default. It uses SIGSTOP, because a Go program cannot take its handler of SIGTSTP away again.
func stopProcess(sig <-chan os.Signal) (stopped bool) {
	session, err := unix.Getsid(0)
	if err != nil || session == unix.Getpgrp() || unix.Kill(unix.Getpid(), unix.SIGSTOP) != nil {
		return false
	}
	for got := range sig {
		if got == unix.SIGCONT {
			break
		}
	}
	return true
}
