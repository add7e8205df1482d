package main

import (
	"context"
	"errors"
	"time"
)

// linger shows what is left, in a line, of what goes on by itself until nothing is. After timeout it gives pending of the last line, and
// after Ctrl-C it says what goesOn.
func (e *env) linger(ctx context.Context, timeout time.Duration, look func(ctx context.Context) (left string, over bool, err error),
	goesOn string, pending func(left string) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	scr, said := newScreen(e.io), ""
	tick := time.NewTicker(redrawEvery)
	defer tick.Stop()
	for {
		left, over, err := look(ctx)
		if err != nil && ctx.Err() == nil {
			return err
		}
		if over {
			scr.show()
			return nil
		}
		switch {
		case left == "":
		case scr.tty:
			scr.show(left)
		case left != said:
			scr.say("%s", left)
		}
		if left != "" {
			said = left
		}
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
		}
		scr.show()
		if errors.Is(context.Cause(ctx), errInterrupted) {
			talk(e.io.Err, "interrupted; %s", goesOn)
			return &silentError{code: exitInterrupted}
		}
		return pending(said)
	}
}
