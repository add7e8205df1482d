// Package shim keeps an engine alive while dpserve restarts. A shim is a small process between the node and
// one engine: the hidden command `dpserve shim DIR`. It starts the engine, holds its output and its exit
// status, answers the node over a unix socket, and ends the engine when no node has come back in time.
//
// The shim restarts nothing and decides nothing about ranks. It ends its engine by itself only when nobody is
// responsible for it: no owner for the orphan timeout, an expired fence, a folder that was removed, SIGTERM.
// It has its own session, so nothing that ends the node ends it; SIGKILL of the shim ends the engine's front
// process, and the shim reaps what the engine leaves behind.
//
// Everything that an engine started is known by its cgroup; without one by its descent from the shim while
// the shim lives, and by the session of the front process. Numbers count only with their boot. A folder
// engines/LAUNCH has spec.json (what the node asks, written before the fork), state.json (by what the launch
// is known, phase, exit status), the socket, and logs. state.json names the folder by device and inode
// number: in a copy nothing of the launch is touched.
//
// The protocol is one JSON object a line: info, watch (ownership, until the connection closes), signal,
// extend, logs, release. A shim speaks the version of its spec; a node speaks its own and the one before.
// Both sides check that the other is the same user. The engine never waits for the shim's disk or for a
// reader.
package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/process"
)

// Files of one engine, in a folder of its own.
const (
	specFile   = "spec.json"
	stateFile  = "state.json"
	socketFile = "shim.sock"
	ownLogFile = "shim.log" // what the shim itself has to say
)

// Command is the hidden command that is a shim.
const Command = "shim"

// Spec is what a node asks of a shim. It is on disk before anything runs.
type Spec struct {
	Version int    `json:"version"` // of the protocol
	Cluster string `json:"cluster"` // id of the cluster, and UID of the node, that started it
	Node    string `json:"node"`
	Boot    string `json:"boot"` // process.BootID
	ID      string `json:"id"`   // of the launch; the name of its folder

	Path string   `json:"path"` // of the engine's program
	Argv []string `json:"argv"`
	Env  []string `json:"env"`
	Dir  string   `json:"dir"` // where the engine runs

	Output string `json:"output"` // file to which its output is appended; "" = none

	Orphan time.Duration `json:"orphan_timeout_ns"` // how long the engine lives without an owner
	Lease  time.Duration `json:"lease_ns"`          // on_lease_loss fence: until the first Extend; 0 = serve
	Grace  time.Duration `json:"grace_ns"`          // from SIGTERM to SIGKILL

	Order json.RawMessage `json:"order,omitempty"` // the node's own description of the launch
}

// Phase says how far an engine is.
type Phase string

// The phases of an engine in a shim.
const (
	Running Phase = "running"
	Ending  Phase = "ending" // it was told to end
	Exited  Phase = "exited"
)

// State is what a shim knows of its engine. The shim writes it before it listens, again when the engine runs,
// and at the engine's end.
type State struct {
	process.Launch

	Folder   Folder        `json:"folder"`              // of the launch
	NoCgroup string        `json:"no_cgroup,omitempty"` // why the engine has no cgroup of its own
	Began    time.Time     `json:"began"`
	Phase    Phase         `json:"phase"`
	Reason   string        `json:"reason,omitempty"` // why the shim itself has ended the engine
	Exit     *process.Exit `json:"exit,omitempty"`
}

// Folder identifies a folder: a copy of it has other numbers.
type Folder struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
}

// folderOf returns the zero Folder for what is none.
func folderOf(dir string) Folder {
	var s syscall.Stat_t
	if syscall.Stat(dir, &s) != nil {
		return Folder{}
	}
	return Folder{uint64(s.Dev), s.Ino} //nolint:unconvert // the type of Dev differs between systems
}

// Info is the answer of a shim about itself.
type Info struct {
	Spec  Spec   `json:"spec"`
	State State  `json:"state"`
	Read  uint64 `json:"read"` // number of the first line that no owner has read
}

// errDamaged says that a file of a shim is not what a shim writes.
var errDamaged = errors.New("damaged file")

func (s *Spec) check() error {
	switch {
	case s.Version < 1:
		return fmt.Errorf("%w: no version", errDamaged)
	case s.ID == "" || s.ID != filepath.Base(s.ID) || s.ID == "." || s.ID == "..":
		return fmt.Errorf("%w: %q is no launch", errDamaged, s.ID)
	case s.Path == "" || len(s.Argv) == 0:
		return fmt.Errorf("%w: no command", errDamaged)
	case s.Orphan < 0 || s.Lease < 0 || s.Grace < 0:
		return fmt.Errorf("%w: a time below zero", errDamaged)
	}
	return nil
}

// parseSpec reads the bytes of a spec file.
func parseSpec(text []byte) (Spec, error) {
	var s Spec
	if err := json.Unmarshal(text, &s); err != nil {
		return Spec{}, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return s, s.check()
}

func readSpec(dir string) (Spec, error) {
	text, err := os.ReadFile(filepath.Join(dir, specFile))
	if err != nil {
		return Spec{}, err
	}
	return parseSpec(text)
}

// readState returns the zero State if the shim has not come so far, or the file is damaged.
func readState(dir string) State {
	var s State
	text, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil || json.Unmarshal(text, &s) != nil ||
		s.Cgroup != "" && filepath.Base(s.Cgroup) != process.CgroupPrefix+filepath.Base(dir) {
		return State{}
	}
	return s
}

// isCopy reports whether a state was written in another folder than the one in which it lies.
func (s *State) isCopy(dir string) bool { return s.Folder != Folder{} && s.Folder != folderOf(dir) }

// Left lists the living processes of a launch: of its engine, and its shim.
func (s *State) Left() []int {
	left := s.PIDs()
	if s.HasShim() {
		left = append(left, s.Shim)
	}
	return left
}

// End kills everything of a launch, its shim last, until nothing is left. The error names what no signal
// ended.
func (s *State) End() error {
	if left := s.Launch.End(endWait); len(left) > 0 {
		return fmt.Errorf("processes %v of the engine with process %d do not end", left, s.PID)
	}
	return nil
}

// endWait bounds how long End kills.
const endWait = 5 * time.Second

func writeFile(dir, name string, v any) error {
	return diskfile.ReplaceJSON(filepath.Join(dir, name), v)
}
