package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// Pace of what raft says at error: it repeats itself about a peer that is down twice a second.
const (
	errorEvery   = 30 * time.Second // one message about anything but a peer
	peerPatience = 5 * time.Second  // a peer may not answer so long before it is a warning: it is joining, restarting or being elected
	peerEvery    = 10 * time.Minute // between two warnings about one peer
	peerRest     = 10 * time.Second // without an error about a peer: it has answered, if it was not seen to answer before
)

// raftLog lets raft and raft-wal write to slog. What they call an error stays one, but for repetitions; everything else is debug,
// because their warnings tell of elections that are normal for a single voter. That a peer does not answer is a warning, and only if
// it lasts: nodes that end are reported elsewhere. Nodes are named: raft knows their UIDs only.
type raftLog struct {
	slog    *slog.Logger
	name    string
	implied []any
	said    *said
	nameOf  func(uid string) string // "" = not known

	answered func(uid string) time.Time // when a node answered heartbeats and entries; zero = never
}

// said is what came at error last, and when.
type said struct {
	mu    sync.Mutex
	when  map[string]time.Time // by message; raft has about forty
	peers map[string]*failing  // by node; those of the cluster
}

// failing is a peer that does not answer.
type failing struct {
	since, last, warned time.Time
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

// warns notes that a peer did not answer, and says whether a person should hear of it now, and since when. answered is when it did last.
func (s *said) warns(peer string, answered time.Time) (since time.Time, warn bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	f := s.peers[peer]
	if f == nil || now.Sub(f.last) > peerRest || answered.After(f.last) {
		f = &failing{since: now}
		s.peers[peer] = f
	}
	f.last = now
	if now.Sub(f.since) < peerPatience || !f.warned.IsZero() && now.Sub(f.warned) < peerEvery {
		return f.since, false
	}
	f.warned = now
	return f.since, true
}

var _ hclog.Logger = (*raftLog)(nil)

func newRaftLog(l *slog.Logger, nameOf func(uid string) string, answered func(uid string) time.Time) *raftLog {
	return &raftLog{
		slog: l.With("room", "cluster"), name: "raft", nameOf: nameOf, answered: answered,
		said: &said{when: map[string]time.Time{}, peers: map[string]*failing{}},
	}
}

// Log writes one line.
func (r *raftLog) Log(level hclog.Level, msg string, args ...any) {
	ctx, to := context.Background(), slog.LevelDebug
	if level == hclog.Error {
		if uid, ok := peerOf(args); ok {
			r.unreached(uid, errorOf(args))
		} else if !brokenOff(args) && !r.said.again(msg) {
			to = slog.LevelError
		}
	}
	if r.slog.Enabled(ctx, to) {
		r.slog.Log(ctx, to, r.name+": "+msg, r.formatted(args)...) //nolint:sloglint // the message and the keys are raft's
	}
}

// unreached warns of a node that has not answered for long. Without an error it has answered: it knows of a newer term.
func (r *raftLog) unreached(uid string, err error) {
	if err == nil || errors.Is(err, errResting) {
		return
	}
	peer := r.nodeName(uid)
	if since, warn := r.said.warns(peer, r.answered(uid)); warn {
		r.slog.Warn("consensus does not reach a node", "peer", peer, "for", time.Since(since).Round(time.Second), "err", err)
	}
}

// peerOf is the UID of the node that an error is about: "peer" and "target" are what raft calls one that it could not reach.
func peerOf(args []any) (uid string, ok bool) {
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] == "peer" || args[i] == "target" {
			return uidOf(args[i+1])
		}
	}
	return "", false
}

// uidOf is the UID of the node that raft means. ok is false for what is no node.
func uidOf(v any) (uid string, ok bool) {
	switch v := v.(type) {
	case raft.Server:
		return string(v.ID), true
	case raft.ServerID:
		return string(v), true
	case raft.ServerAddress:
		return string(v), true
	}
	return "", false
}

// nodeName is the name of a node, or its UID if the name is not known.
func (r *raftLog) nodeName(uid string) string {
	if name := r.nameOf(uid); name != "" {
		return name
	}
	return uid
}

// errorOf is the error of a message, nil if it has none.
func errorOf(args []any) error {
	for i := 0; i+1 < len(args); i += 2 {
		if err, ok := args[i+1].(error); ok && args[i] == "error" {
			return err
		}
	}
	return nil
}

// brokenOff says that a message tells of a connection that its other end has closed, or of raft or its transport that was told to stop:
// both are reported elsewhere. Or of an entry that the log no longer has: the follower that lacks it gets a snapshot.
func brokenOff(args []any) bool {
	err := errorOf(args)
	if err == nil {
		return false
	}
	var broken *net.OpError
	if errors.As(err, &broken) {
		return true
	}
	for _, end := range []error{
		io.ErrUnexpectedEOF, net.ErrClosed, errResting, raft.ErrLogNotFound, raft.ErrTransportShutdown, raft.ErrRaftShutdown,
	} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// formatted resolves hclog's delayed Printf values, which slog would print as lists, and names nodes.
func (r *raftLog) formatted(args []any) []any {
	out := make([]any, len(args))
	for i, a := range args {
		out[i] = a
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			out[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		} else if uid, ok := uidOf(a); ok {
			out[i] = r.nodeName(uid)
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
	c.slog = r.slog.With(r.formatted(args)...)
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
