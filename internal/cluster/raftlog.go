package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// Bounds of raft's messages at error: raft repeats a message about a peer that is down twice a second.
const (
	errorEvery = 30 * time.Second // between two equal messages that are not about a peer
	// peerPatience is how long a peer may not answer before the log has a warning: it joins, restarts or
	// elects.
	peerPatience = 5 * time.Second
	peerEvery    = 10 * time.Minute // between two warnings about one peer
	// peerRest is the time without an error after which a peer counts as answering again.
	peerRest = 10 * time.Second
)

// raftLog lets raft and raft-wal write to slog. Their errors stay errors, except repetitions. Everything else
// is debug, because their warnings are about elections that are normal for a single voter. A peer that does
// not answer is a warning, and only if it lasts, because other parts report nodes that end. raftLog replaces
// UIDs by node names.
type raftLog struct {
	hclog.Logger // the methods that raft and raft-wal do not call do nothing

	slog   *slog.Logger
	recent *recentErrors
	nameOf func(uid string) string // "" = not known

	lastAnswer func(uid string) time.Time // when a node answered heartbeats and entries; zero = never
}

// recentErrors are the times of the last messages at error.
type recentErrors struct {
	mu    sync.Mutex
	when  map[string]time.Time        // by message; raft has about forty
	peers map[string]*unreachablePeer // by node; those of the cluster
}

// unreachablePeer is a peer that does not answer.
type unreachablePeer struct {
	since, last, warned time.Time
}

// isRepeated reports whether the same message came less than errorEvery ago.
func (s *recentErrors) isRepeated(msg string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, ok := s.when[msg]
	if ok && time.Since(last) < errorEvery {
		return true
	}
	s.when[msg] = time.Now()
	return false
}

// shouldWarn records that a peer did not answer, and reports whether to warn now, and since when it does not
// answer. lastAnswer is the time of its last answer.
func (s *recentErrors) shouldWarn(peer string, answered time.Time) (since time.Time, warn bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	f := s.peers[peer]
	if f == nil || now.Sub(f.last) > peerRest || answered.After(f.last) {
		f = &unreachablePeer{since: now}
		s.peers[peer] = f
	}
	f.last = now
	if now.Sub(f.since) < peerPatience || !f.warned.IsZero() && now.Sub(f.warned) < peerEvery {
		return f.since, false
	}
	f.warned = now
	return f.since, true
}

func newRaftLog(
	l *slog.Logger, nameOf func(uid string) string, answered func(uid string) time.Time,
) *raftLog {
	return &raftLog{
		Logger: hclog.NewNullLogger(), slog: l.With("component", "cluster"), nameOf: nameOf,
		lastAnswer: answered,
		recent:     &recentErrors{when: map[string]time.Time{}, peers: map[string]*unreachablePeer{}},
	}
}

// Log writes one line.
func (r *raftLog) Log(level hclog.Level, msg string, args ...any) {
	ctx, to := context.Background(), slog.LevelDebug
	if level == hclog.Error {
		if uid, ok := peerOf(args); ok {
			r.warnUnreachable(uid, errorOf(args))
		} else if !isExpectedEnd(args) && !r.recent.isRepeated(msg) {
			to = slog.LevelError
		}
	}
	if r.slog.Enabled(ctx, to) {
		r.slog.Log(ctx, to, "raft: "+msg, r.formatArgs(args)...) //nolint:sloglint // raft's words
	}
}

// warnUnreachable warns of a node that has not answered for long. Without an error it has answered: it knows
// a newer term.
func (r *raftLog) warnUnreachable(uid string, err error) {
	if err == nil || errors.Is(err, errResting) {
		return
	}
	peer := r.nodeName(uid)
	if since, warn := r.recent.shouldWarn(peer, r.lastAnswer(uid)); warn {
		r.slog.Warn("consensus does not reach a node", "peer", peer, "for",
			time.Since(since).Round(time.Second), "err", err)
	}
}

// peerOf returns the UID of the node that an error is about. Raft calls an unreachable node "peer" or
// "target".
func peerOf(args []any) (uid string, ok bool) {
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] == "peer" || args[i] == "target" {
			return uidOf(args[i+1])
		}
	}
	return "", false
}

// uidOf returns the UID of a node in a message of raft. ok is false for other values.
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

// nodeName returns the name of a node, or its UID if the name is not known.
func (r *raftLog) nodeName(uid string) string {
	if name := r.nameOf(uid); name != "" {
		return name
	}
	return uid
}

// errorOf returns the error of a message, nil if it has none.
func errorOf(args []any) error {
	for i := 0; i+1 < len(args); i += 2 {
		if err, ok := args[i+1].(error); ok && args[i] == "error" {
			return err
		}
	}
	return nil
}

// isExpectedEnd reports whether a message is about a connection that the other end has closed, or about raft
// or its transport being told to stop: other parts report both. It is also true for an entry that the log no
// longer has: the follower that lacks it gets a snapshot.
func isExpectedEnd(args []any) bool {
	err := errorOf(args)
	if err == nil {
		return false
	}
	_, isBroken := errors.AsType[*net.OpError](err)
	return isBroken || slices.ContainsFunc([]error{
		io.ErrUnexpectedEOF, net.ErrClosed, errResting, raft.ErrLogNotFound, raft.ErrTransportShutdown,
		raft.ErrRaftShutdown,
	}, func(end error) bool { return errors.Is(err, end) })
}

// formatArgs formats hclog's delayed Printf values, which slog would print as lists, and replaces UIDs by
// names.
func (r *raftLog) formatArgs(args []any) []any {
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

func (r *raftLog) Trace(msg string, args ...any) { r.Log(hclog.Trace, msg, args...) }
func (r *raftLog) Debug(msg string, args ...any) { r.Log(hclog.Debug, msg, args...) }
func (r *raftLog) Info(msg string, args ...any)  { r.Log(hclog.Info, msg, args...) }
func (r *raftLog) Warn(msg string, args ...any)  { r.Log(hclog.Warn, msg, args...) }
func (r *raftLog) Error(msg string, args ...any) { r.Log(hclog.Error, msg, args...) }

// With adds fields to every line.
func (r *raftLog) With(args ...any) hclog.Logger {
	c := *r
	c.slog = r.slog.With(r.formatArgs(args)...)
	return &c
}

// Named returns the same log.
func (r *raftLog) Named(string) hclog.Logger { return r }
