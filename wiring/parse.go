package wiring

import (
	"github.com/dpserve/dpserve/app"
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
