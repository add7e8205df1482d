package server

import (
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// ParseApps reads app.yaml and applies every package's rules. The commands and the server both call it, so
// that they find the same faults.
func ParseApps(file string, text []byte) (*app.File, []app.Warning, error) {
	return app.Parse(file, text, routingRule)
}

// routingRule lets the policy check its own parameters.
func routingRule(a *app.Application) (string, error) {
	_, err := routing.New(a.Routing.Policy, a.Routing.Preset, a.Routing.Params)
	return "routing.params", err
}

// appOf returns the current application of a name; nil if there is none that can be read.
func appOf(st *state.State, name string) *app.Application {
	stored := st.Apps[name]
	if stored == nil {
		return nil
	}
	a, err := stored.Application()
	if err != nil {
		return nil
	}
	return a
}

// longestGrace returns the longest drain time of all applications. Each unit still ends with the time of its
// own application.
func longestGrace(st *state.State) time.Duration {
	var longest time.Duration
	for name := range st.Apps {
		if a := appOf(st, name); a != nil {
			longest = max(longest, app.Seconds(a.GracefulShutdownTimeout))
		}
	}
	return longest
}
