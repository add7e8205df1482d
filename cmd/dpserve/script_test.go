package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	proc "github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/test/ports"
)

// scriptWait is the longest wait of a script command. It is generous, because test machines are busy.
const scriptWait = 30 * time.Second

// scriptsDeadline bounds all scripts together, which take some seconds. A script that waits for ever is
// reported with its output.
const scriptsDeadline = 4 * time.Minute

// TestScripts runs the scripts under testdata/script against the real binary, with real nodes and engines
// where a script starts them.
func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "script"),
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Deadline:            time.Now().Add(scriptsDeadline),
		Condition: func(cond string) (bool, error) {
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Setup: func(env *testscript.Env) error {
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("TMPDIR", env.WorkDir)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exit":    cmdExit,
			"until":   cmdUntil,
			"ports":   cmdPorts,
			"node":    cmdNode,
			"waitfor": cmdWaitFor,
			"engines": cmdEngines,
		},
	})
}

// cmdExit is `exit CODE ARGS…`: dpserve with these arguments ends with this code.
func cmdExit(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exit CODE dpserve-args...")
	}
	err := ts.Exec("dpserve", args[1:]...)
	code := 0
	if exit, ok := err.(*exec.ExitError); ok { //nolint:errorlint // testscript returns it as it is
		code = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if fmt.Sprint(code) != args[0] {
		ts.Fatalf("dpserve %s: exit code %d, wanted %s", strings.Join(args[1:], " "), code, args[0])
	}
}

// cmdUntil is `until REGEXP ARGS…`: it runs dpserve with these arguments until a line of its stdout matches.
func cmdUntil(ts *testscript.TestScript, _ bool, args []string) {
	line, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	if !poll(func() bool {
		return ts.Exec("dpserve", args[1:]...) == nil && line.MatchString(ts.ReadFile("stdout"))
	}) {
		ts.Fatalf("dpserve %s never said %q; it said:\n%s", strings.Join(args[1:], " "), args[0],
			ts.ReadFile("stdout"))
	}
}

// cmdPorts is `ports`: it sets PORTS to a range of engine ports that no other script has.
func cmdPorts(ts *testscript.TestScript, _ bool, _ []string) {
	const size = 500
	base, release, err := ports.Hold(context.Background(), size)
	ts.Check(err)
	ts.Defer(release)
	ts.Setenv("PORTS", fmt.Sprintf("%d-%d", base, base+size-1))
}

// cmdNode is `node FILE`: it waits until FILE (the stdout of start or up with -o json) holds an address, and
// sets DPSERVE_ADDR, URL and PID.
func cmdNode(ts *testscript.TestScript, _ bool, args []string) {
	path := ts.MkAbs(args[0])
	var a address
	if !poll(func() bool {
		text, err := os.ReadFile(path)
		return err == nil && json.Unmarshal(text, &a) == nil
	}) {
		ts.Fatalf("no node told its address in %s", args[0])
	}
	ts.Setenv("DPSERVE_ADDR", a.Admin)
	ts.Setenv("URL", a.URL)
	ts.Setenv("PID", fmt.Sprint(a.PID))
}

// cmdWaitFor is `waitfor FILE TEXT`: it waits until FILE contains TEXT.
func cmdWaitFor(ts *testscript.TestScript, _ bool, args []string) {
	path := ts.MkAbs(args[0])
	if !poll(func() bool {
		text, err := os.ReadFile(path)
		return err == nil && strings.Contains(string(text), args[1])
	}) {
		text, _ := os.ReadFile(path)
		ts.Fatalf("%s never held %q; it holds:\n%s", args[0], args[1], text)
	}
}

// cmdEngines is `engines N PID`: it waits until the shims of a node's process PID have exactly N engines.
func cmdEngines(ts *testscript.TestScript, _ bool, args []string) {
	last := ""
	if !poll(func() bool { last = fmt.Sprint(len(enginesOf(args[1]))); return last == args[0] }) {
		ts.Fatalf("%s engines of process %s, wanted %s", last, args[1], args[0])
	}
}

// enginesOf lists the engines of a node's process: its shims' children.
func enginesOf(node string) (out []int) {
	pid, _ := strconv.Atoi(node)
	for _, shim := range proc.Children(pid) {
		for _, engine := range proc.Children(shim.PID) {
			if !engine.Zombie {
				out = append(out, engine.PID)
			}
		}
	}
	return out
}

func poll(ok func() bool) bool {
	deadline := time.Now().Add(scriptWait)
	for time.Now().Before(deadline) {
		if ok() {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}

// TestScriptNames checks that every command has a script that is named for it.
func TestScriptNames(t *testing.T) {
	root := newRoot(newCLI(t).env)
	scripts, err := filepath.Glob("testdata/script/*.txtar")
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, s := range scripts {
		name, _, _ := strings.Cut(strings.TrimSuffix(filepath.Base(s), ".txtar"), "_")
		seen[name] = true
	}
	for _, cmd := range root.Commands() {
		require.True(t, seen[cmd.Name()], "command %s has no script", cmd.Name())
	}
}
