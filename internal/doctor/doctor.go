// Package doctor judges the facts of a machine that is to run a node, and of a cluster that runs. Each check
// gives findings, and a finding that needs a person says what to do. The package is pure: its folder host
// collects the facts of this machine, and the command asks the cluster.
package doctor

import (
	"fmt"
	"strings"
	"time"

	"github.com/dpserve/dpserve/client"
)

// Level says how bad a finding is.
type Level string

// The levels.
const (
	OK   Level = "ok"
	Warn Level = "warn" // it works now, and may not under load or later
	Fail Level = "FAIL" // something does not work, or will not
)

// Finding is one line of the result.
type Finding struct {
	Level Level  `json:"level"`
	Check string `json:"check"`
	Found string `json:"found"`
	Hint  string `json:"hint,omitempty"` // what to do; empty with OK
}

// Facts are all that the checks look at. A part that is empty was not looked at: its check gives no finding.
type Facts struct {
	Clock       *Clock
	Ports       []Port
	EnginePorts *EnginePorts
	Files       *Files
	Shared      *SharedMemory
	DataDir     *DataDir
	Certificate *Certificate
	Leftovers   []Leftover
	Devices     *Devices
	Engines     []Engine
	Models      []Model
	Cluster     *Cluster
	Now         time.Time
}

// Cluster is what the admin API of a running node tells.
type Cluster struct {
	Address string // of the admin API
	Wanted  bool   // the user named it, or it answered in part: an error is a fault
	Error   string // why it did not answer; "" = it did
	Hint    string // to Error
	Node    string // that answered
	Version string
	Nodes   []client.NodeStatus
	Apps    []client.AppStatus
	// tokens per block by which each application's Router looks prompts up; only those that go by tokens
	RouterBlocks map[string]int
}

// Examine returns the findings of all checks, in the order in which a person would look.
func Examine(f *Facts) []Finding {
	checks := []func(*Facts) []Finding{
		checkClock, checkPorts, checkEnginePorts, checkFiles, checkShared, checkDataDir, checkCertificate,
		checkLeftovers, checkDevices, checkEngines, checkModels, checkNodes, checkBlockSizes, checkEvents,
		checkBalance,
	}
	var out []Finding
	for _, check := range checks {
		out = append(out, check(f)...)
	}
	return out
}

// Count returns how many findings have a level.
func Count(findings []Finding, level Level) int {
	n := 0
	for i := range findings {
		if findings[i].Level == level {
			n++
		}
	}
	return n
}

// findings collects the findings of one check.
type findings struct {
	check string
	list  []Finding
}

func (f *findings) ok(format string, args ...any) { f.add(OK, "", format, args...) }

func (f *findings) warn(hint, format string, args ...any) { f.add(Warn, hint, format, args...) }

func (f *findings) fail(hint, format string, args ...any) { f.add(Fail, hint, format, args...) }

func (f *findings) add(level Level, hint, format string, args ...any) {
	f.list = append(f.list, Finding{level, f.check, fmt.Sprintf(format, args...), hint})
}

// orOK returns the findings, or one that all is well if there are none.
func (f *findings) orOK(format string, args ...any) []Finding {
	if len(f.list) == 0 {
		f.ok(format, args...)
	}
	return f.list
}

// Units of bytes.
const (
	mebibyte = 1 << 20
	gibibyte = 1 << 30
)

// formatBytes returns a number of bytes in the largest binary unit that leaves at least one.
func formatBytes(n uint64) string {
	switch {
	case n >= gibibyte:
		return fmt.Sprintf("%.1f GiB", float64(n)/gibibyte)
	case n >= mebibyte:
		return fmt.Sprintf("%d MiB", n/mebibyte)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

// formatCount returns "1 rank" or "2 ranks".
func formatCount(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// some lists at most three names and says how many are left out.
func some(names []string) string {
	const most = 3
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
