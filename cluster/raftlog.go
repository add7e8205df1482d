package cluster

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

// errorEvery is how often one message of raft's may come at error: about a peer that is down it has one twice a second.
const errorEvery = 30 * time.Second

// raftLog lets raft and raft-wal write to slog. What they call an error stays one, but for repetitions; everything else is debug,
// because their warnings tell of elections that are normal for a single voter.
type raftLog struct {
	slog    *slog.Logger
	name    string
	implied []any
	said    *said
}

// said is when which message came at error last; raft has about forty.
type said struct {
	mu   sync.Mutex
	when map[string]time.Time
}

// again says whether a message came less than errorEvery ago.
func (s *said) again(msg string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, ok := s.when[msg]
	if ok && time.Since(last) < errorEvery {
		return true
	}
	s.when[msg] = time.Now()
	return false
}

var _ hclog.Logger = (*raftLog)(nil)

func newRaftLog(l *slog.Logger) *raftLog {
	return &raftLog{slog: l.With("room", "cluster"), name: "raft", said: &said{when: map[string]time.Time{}}}
}

// Log writes one line.
func (r *raftLog) Log(level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug
	if level == hclog.Error && !r.said.again(msg) {
		to = slog.LevelError
	}
	ctx := context.Background()
	if r.slog.Enabled(ctx, to) {
		r.slog.Log(ctx, to, r.name+": "+msg, formatted(args)...) //nolint:sloglint // the message and the keys are raft's
	}
}

// formatted resolves hclog's delayed Printf values, which slog would print as lists.
func formatted(args []any) []any {
	out := make([]any, len(args))
	for i, a := range args {
		out[i] = a
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			out[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	return out
}

// Trace and the four below write at their level.
func (r *raftLog) Trace(msg string, args ...any) { r.Log(hclog.Trace, msg, args...) }

// Debug writes a debug line.
func (r *raftLog) Debug(msg string, args ...any) { r.Log(hclog.Debug, msg, args...) }

// Info writes a debug line.
func (r *raftLog) Info(msg string, args ...any) { r.Log(hclog.Info, msg, args...) }

// Warn writes a debug line.
func (r *raftLog) Warn(msg string, args ...any) { r.Log(hclog.Warn, msg, args...) }

// Error writes an error line.
func (r *raftLog) Error(msg string, args ...any) { r.Log(hclog.Error, msg, args...) }

func (r *raftLog) debug() bool { return r.slog.Enabled(context.Background(), slog.LevelDebug) }

// IsTrace and the four below say whether a line would be written.
func (r *raftLog) IsTrace() bool { return r.debug() }

// IsDebug says whether debug lines are written.
func (r *raftLog) IsDebug() bool { return r.debug() }

// IsInfo says whether info lines are written: as debug.
func (r *raftLog) IsInfo() bool { return r.debug() }

// IsWarn says whether warnings are written: as debug.
func (r *raftLog) IsWarn() bool { return r.debug() }

// IsError says that errors are written.
func (r *raftLog) IsError() bool { return true }

// With adds fields to every line.
func (r *raftLog) With(args ...any) hclog.Logger {
	c := *r
	c.implied = append(append([]any{}, r.implied...), args...)
	c.slog = r.slog.With(formatted(args)...)
	return &c
}

// ImpliedArgs are the fields of With.
func (r *raftLog) ImpliedArgs() []any { return r.implied }

// Name is the prefix of every line.
func (r *raftLog) Name() string { return r.name }

// Named adds to the prefix.
func (r *raftLog) Named(name string) hclog.Logger { return r.ResetNamed(r.name + "." + name) }

// ResetNamed replaces the prefix.
func (r *raftLog) ResetNamed(name string) hclog.Logger {
	c := *r
	c.name = name
	return &c
}

// SetLevel does nothing: the level is slog's.
func (r *raftLog) SetLevel(hclog.Level) {}

// GetLevel is slog's level in hclog's words.
func (r *raftLog) GetLevel() hclog.Level {
	if r.debug() {
		return hclog.Debug
	}
	return hclog.Error
}

// StandardLogger is for libraries that want log.Logger; raft's transports do, the one in memory does not.
func (r *raftLog) StandardLogger(*hclog.StandardLoggerOptions) *log.Logger {
	return slog.NewLogLogger(r.slog.Handler(), slog.LevelDebug)
}

// StandardWriter is for libraries that want an io.Writer.
func (r *raftLog) StandardWriter(opts *hclog.StandardLoggerOptions) io.Writer {
	return r.StandardLogger(opts).Writer()
}
