package main

import (
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/wiring"
)

// nodeFlags are the flags that shape a node, shared by up and start.
type nodeFlags struct {
	config wiring.Config
	labels map[string]string
	timers map[string]string
}

// addCommon adds what both up and start take.
func (f *nodeFlags) addCommon(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.config.GPUs, "gpus", f.config.GPUs, "devices to offer: a `list` like 0-3,6 or a count")
	flags.IntVar(&f.config.Slots, "slots", f.config.Slots, "ranks without devices that this node takes")
	flags.StringVar(&f.config.PortRange, "port-range", f.config.PortRange, "ports for engines, `LO-HI`, on loopback")
	flags.StringToStringVar(&f.labels, "labels", nil, "`key=value` labels that resources.labels of an app must match")
	flags.StringToStringVar(&f.timers, "timers", nil, "`name=duration` overrides of timers, for support and tests")
	flags.Lookup("labels").DefValue, flags.Lookup("timers").DefValue = "", "" // "[]" would be noise in help
	flags.StringVar(&f.config.LogFormat, "log-format", f.config.LogFormat, "text or json")
	flags.StringVar(&f.config.LogLevel, "log-level", f.config.LogLevel, "debug, info, warn or error")
}

// node gives the config as the flags say. wiring.Config.Validate judges it; only what is no config value is judged here.
func (f *nodeFlags) node() (wiring.Config, error) {
	c := f.config
	c.Version = readBuildInfo().Version
	c.Labels = f.labels
	c.Timers = make(map[string]time.Duration, len(f.timers))
	for name, text := range f.timers {
		d, err := time.ParseDuration(text)
		if err != nil {
			return c, problem.New(problem.InvalidArgument, "--timers %s=%s: wanted a duration", name, text).WithHint("for example --timers %s=500ms", name)
		}
		c.Timers[name] = d
	}
	if err := oneOf("--log-format", c.LogFormat, "text", "json"); err != nil {
		return c, err
	}
	return c, oneOf("--log-level", c.LogLevel, "debug", "info", "warn", "error")
}

func oneOf(flag, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return problem.New(problem.InvalidArgument, "%s %q: wanted %s", flag, value, strings.Join(allowed, ", "))
}
