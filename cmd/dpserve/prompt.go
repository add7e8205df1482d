package main

import (
	"bufio"
	"fmt"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// confirm asks for a name before something is destroyed. Without a terminal nobody can answer, so --yes is the only way.
func (e *env) confirm(what, name string, yes bool) error {
	if yes {
		return nil
	}
	if !e.io.InTTY || !e.io.ErrTTY {
		return problem.New(problem.InvalidArgument, "%s: this needs a confirmation, and there is no terminal to ask on", what).
			WithHint("--yes confirms it")
	}
	_, _ = fmt.Fprintf(e.io.Err, "dpserve: %s; type %s to confirm: ", what, name)
	answer, err := bufio.NewReader(e.io.In).ReadString('\n')
	if err == nil && strings.TrimSpace(answer) == name {
		return nil
	}
	return problem.New(problem.InvalidArgument, "not confirmed, nothing was changed").WithHint("type %s, or pass --yes", name)
}
