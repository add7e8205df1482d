package node_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/app"
)

// scripted is an app whose engine is a shell script. The flags of its rank are the arguments of the script.
func scripted(coupling app.Coupling, dpSize int, script string) *app.Application {
	a := demo(coupling, dpSize, "")
	a.Engine.Command = []string{"/bin/sh", "-c", script, "engine"}
	return a
}

const (
	noMemory = `echo "(EngineCore pid=9) ERROR 11-21 03:05:02 [core.py:1131] torch.OutOfMemoryError: CUDA ` +
		`out of memory. Tried to allocate 1.47 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 ` +
		`GiB is free." >&2` + "\n"
	traceback = `i=0; while [ $i -lt 60 ]; do echo "(APIServer pid=8)   File serve.py, line $i" >&2; ` +
		`i=$((i+1)); done; echo "RuntimeError: Engine core initialization failed. See root cause above." ` +
		">&2\n"
	noMemoryHint = "GPU 0 is out of memory: 1.47 GiB wanted, 1.25 GiB of 79.11 GiB free; lower "
)

// The cause stands far above the last lines, or in the log of the rank that ended with another one's failure.
func TestAFailedStartEndsWithItsCause(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		coupling app.Coupling
		script   string
		reason   string
	}{
		"above the last lines": {
			app.Independent, noMemory + traceback + "exit 1", "^engine exited with code 1 after [^:]*: " +
				noMemoryHint,
		},
		"in another rank's log": {
			app.Lockstep, `case "$*" in *"--data-parallel-rank 1 "*) ` + noMemory + `sleep 600;; esac` +
				"\nwhile ! [ -e READ ]; do sleep 0.02; done; exit 1",
			"^rank 0: engine exited with code 1 after [^:]*; rank 1: " + noMemoryHint,
		},
		"the engine's own words": {
			app.Independent, `echo "ValueError: no such thing"; exit 3`,
			"^engine exited with code 3 after [^:]*: the engine says ValueError: no such thing$",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r, read := newRig(t), filepath.Join(t.TempDir(), "read")
			r.start(scripted(c.coupling, 2, strings.ReplaceAll(c.script, "READ", read)))
			if c.coupling == app.Lockstep { // the other rank's line is read before this rank ends
				r.eventually("the engine's line", func() bool { return r.hasLogged("OutOfMemoryError") })
				require.NoError(t, os.WriteFile(read, nil, 0o600))
			}
			e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
			assert.Regexp(t, c.reason, e.Reason)
			assert.LessOrEqual(t, len(e.LogTail), 20)
		})
	}
}

// hasLogged reports whether the log of an engine contains a text.
func (r *rig) hasLogged(text string) bool {
	var lines strings.Builder
	_ = r.node.Logs(r.t.Context(), node.LogQuery{Rank: -1}, func(l node.LogLine) error {
		lines.WriteString(l.Text)
		return nil
	})
	return strings.Contains(lines.String(), text)
}

// A bar that moves shows while the rank starts, and in the reason when the start takes too long.
func TestAStartShowsWhatTheEngineSaysOfIt(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *node.Config) { c.Timers.StartupTimeout = 6 * time.Second })
	m := r.start(scripted(app.Independent, 1,
		`printf 'Loading safetensors checkpoint shards:  12%% Completed | 1/8 [00:02<00:14]\r' >&2; `+
			"sleep 600"))
	r.eventually("the progress of the load", func() bool {
		s := r.statuses(m)
		return len(s) == 1 && s[0].Progress == "loading weights 1 of 8"
	})
	e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.Contains(t, e.Reason, "(engine.startup_timeout_s); rank 0: loading weights 1 of 8")
}

func TestAStopThatWasAskedForHasNoOtherCause(t *testing.T) {
	r := newRig(t)
	m := r.start(scripted(app.Independent, 1, noMemory+"sleep 600"))
	r.eventually("the engine's line", func() bool { return r.hasLogged("OutOfMemoryError") })
	r.stop(m, 0)
	assert.Equal(t, "deleted", r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling).Reason)
}
