package shim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"
)

// Entry is the folder of a launch.
type Entry struct {
	Dir    string
	Spec   Spec    // zero if it cannot be read
	State  State   // of the shim, or as far as it came
	Client *Client // connected, but not the owner; nil with Err
	Unread uint64  // see Info.Read
	// Err is ErrGone for a shim that has ended, with a stale socket or without one. ErrCopy: the launch is
	// that of another folder. ErrForeign, ErrSilent, a *VersionError: it may live, and this process cannot
	// use it. Others: damaged files.
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

// Read reads the folder of a launch, and connects to nothing.
func Read(dir string) Entry {
	e := Entry{Dir: dir, State: readState(dir)}
	e.Spec, e.Err = readSpec(dir)
	switch {
	case e.State.isCopy(dir):
		e.Err = ErrCopy
	case e.Err == nil && e.Spec.ID != filepath.Base(dir):
		e.Err = errDamaged
	}
	return e
}

// look reads a folder and connects to its shim.
func (e *Entry) look(ctx context.Context) {
	*e = Read(e.Dir)
	if e.Err != nil {
		return
	}
	c, info, err := Connect(ctx, e.Dir, &e.State)
	if err != nil {
		e.Err = err
		return
	}
	e.Client, e.State, e.Unread = c, info.State, info.Read
}

// Connect connects to the shim that has written a state in a folder. Errors: ErrGone, ErrForeign, ErrSilent,
// ErrProtocol, *VersionError.
func Connect(ctx context.Context, dir string, s *State) (*Client, Info, error) {
	c, err := connect(ctx, dir, s.Launch)
	if err != nil {
		return nil, Info{}, err
	}
	info, err := c.Info(ctx)
	if err != nil {
		c.Close()
		return nil, Info{}, err
	}
	return c, info, nil
}

// Remove ends whatever is left of the launch that was made in a folder, verifies that it is gone, and removes
// the folder. What a copy names is not touched: it belongs to the other folder.
func Remove(dir string) error {
	if s := readState(dir); !s.isCopy(dir) {
		if err := s.End(); err != nil {
			return err
		}
	}
	return os.RemoveAll(dir)
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
