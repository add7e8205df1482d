package shim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/internal/process"
)

// Entry is the folder of a launch.
type Entry struct {
	Dir    string
	Spec   Spec    // zero if it cannot be read
	State  State   // of the shim, or as far as it came
	Client *Client // connected, but not the owner; nil with Err
	Read   uint64  // see Info
	// Err is ErrGone for a shim that has ended, with a stale socket or without one. ErrForeign, ErrSilent, a
	// *VersionError: it may live, and this process cannot use it. Others: damaged files.
	Err error
}

// lookAtOnce is how many folders are looked at at a time: one that does not answer delays few.
const lookAtOnce = 64

// Discover looks at every launch below a folder. A folder that does not exist has none.
func Discover(ctx context.Context, dir string) ([]Entry, error) {
	names, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Entry
	for _, n := range names {
		if n.IsDir() {
			out = append(out, Entry{Dir: filepath.Join(dir, n.Name())})
		}
	}
	var all errgroup.Group
	all.SetLimit(lookAtOnce)
	for i := range out {
		all.Go(func() error {
			out[i].look(ctx)
			return nil
		})
	}
	return out, all.Wait()
}

// look reads a folder and connects to its shim.
func (e *Entry) look(ctx context.Context) {
	e.Spec, e.Err = readSpec(e.Dir)
	e.State = readState(e.Dir)
	if e.Err == nil && e.Spec.ID != filepath.Base(e.Dir) {
		e.Err = errDamaged
	}
	if e.Err != nil {
		return
	}
	e.Client, e.Err = connect(ctx, e.Dir, e.Spec.ID)
	if e.Err != nil {
		return
	}
	info, err := e.Client.Info(ctx)
	if err != nil {
		e.Client.Close()
		e.Client, e.Err = nil, err
		return
	}
	e.State, e.Read = info.State, info.Read
}

// endWait bounds how long End kills.
const endWait = 5 * time.Second

// End kills the shim of a launch and everything that carries the mark of its engine until nothing is left.
// The error names what no signal ended.
func End(id string) error {
	if left := process.EndAll(func() []int { return Left(id) }, endWait); len(left) > 0 {
		return fmt.Errorf("processes %v of launch %s do not end", left, id)
	}
	return nil
}

// Left lists the living processes of a launch: its shim, and what carries the mark of its engine.
func Left(id string) []int {
	return process.Descendants(0, "", shimMark(id), process.Mark(id))
}

// CheckSpecs reports whether this binary understands the engines below a folder. Only a version above its own
// is an error: shims of older versions than Oldest are ended and their engines started again.
func CheckSpecs(dir string) error {
	names, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, n := range names {
		spec, err := readSpec(filepath.Join(dir, n.Name()))
		if err == nil && spec.Version > Version { // what cannot be read is judged at the start
			return fmt.Errorf("engine %s: %w", n.Name(), &VersionError{spec.Version})
		}
	}
	return nil
}
