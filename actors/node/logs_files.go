package node

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

const (
	logKept  = 7 * 24 * time.Hour // a removed application's file is deleted this long after its last line
	logSweep = 10 * time.Minute   // between two checks for such files, and for rings
)

// file is where the shim of a rank's engine writes the output; "" = nowhere.
func (s *logStore) file(unit string, rank int) string {
	if s.dir == "" {
		return ""
	}
	return filepath.Join(s.dir, strings.ReplaceAll(unit, "/", ".")+"."+strconv.Itoa(rank)+".log")
}

// logName matches the file of a rank: application, pool if it has two, group, for independent ranks the rank
// as unit, and the rank; .1 is the older file.
var logName = regexp.MustCompile(`^([^.]+)(?:\.[a-z]+)?(\.[0-9]+){2,3}\.log(\.1)?$`)

// forget drops what is left of applications that do not exist any more: rings goneKept after the end of the
// engine, and files logKept after the last line.
func (s *logStore) forget(isThere func(app string) bool) {
	s.mu.Lock()
	for key, r := range s.rings {
		switch {
		case r.gone.IsZero() || isThere(r.app):
		case time.Since(r.gone) >= goneKept:
			s.drop(key)
		default: // it crashed before its application was deleted
			s.keep(r, goneLines)
		}
	}
	s.mu.Unlock()
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return // the directory does not exist yet
	}
	for _, f := range files {
		m := logName.FindStringSubmatch(f.Name())
		info, err := f.Info()
		if m == nil || err != nil || isThere(m[1]) || time.Since(info.ModTime()) <= logKept {
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, f.Name())); err != nil {
			s.log.Warn("cannot delete an old log file", slog.String("err", err.Error()))
		}
	}
}

// sweep forgets the logs of applications that have gone. Close does not wait for it, because a disk may hang.
func (s *logStore) sweep(ctx context.Context, current func() *state.State) {
	each := time.NewTicker(logSweep)
	defer each.Stop()
	for {
		select {
		case <-each.C:
		case <-ctx.Done():
			return
		}
		if now := current(); now.Index > 0 {
			s.forget(func(app string) bool { return now.Apps[app] != nil })
		}
	}
}
