package membership

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Reason is why gossip was turned away: a closed list.
type Reason string

// The reasons.
const (
	BadKey     Reason = "key"       // not encrypted, or with another key
	BadCluster Reason = "cluster"   // another cluster, or a removed node
	Malformed  Reason = "malformed" // encrypted with our key, but no sense
	Conflict   Reason = "conflict"  // one name at two addresses
)

// Lines of memberlist's log that mean something to us. It has no other way to tell.
var told = []struct {
	text   string
	reason Reason
}{
	{"could decrypt the message", BadKey},
	{"to decrypt", BadKey},
	{"decrypt empty payload", BadKey},
	{"remote state is not encrypted", BadKey},
	{"Decrypt packet failed", BadKey},
	{"stream label header", BadKey}, // a stranger's first bytes
	{"packet label header", BadKey},
	{"unacceptable label", BadKey},
	{"ignoring alive message", BadCluster},
	{"push/pull merge", BadCluster},
	{"Conflicting address", Conflict},
	{"Failed to decode", Malformed},
	{"not supported", Malformed},
	{"invalid msgType", Malformed},
	{"invalid checksum", Malformed},
	{"missing message type", Malformed},
	{"Failed to decompress", Malformed},
}

// noUDP is what memberlist says when only TCP gets through.
const noUDP = "UDP probes failed"

// warnEvery bounds warnings, per reason; noUDPEvery those about the network.
const (
	warnEvery  = time.Second
	noUDPEvery = time.Minute
)

// listener reads memberlist's log: refusals are counted and told at most once per second and reason, the rest is for debugging.
type listener struct {
	log     *slog.Logger
	refused func(Reason)

	mu   sync.Mutex
	last map[string]time.Time
	left map[string]int // not told since
}

func newListener(log *slog.Logger, refused func(Reason)) *listener {
	return &listener{log: log, refused: refused, last: map[string]time.Time{}, left: map[string]int{}}
}

// Write takes one line.
func (l *listener) Write(line []byte) (int, error) {
	text := string(bytes.TrimSpace(line))
	if i := strings.Index(text, "memberlist: "); i >= 0 {
		text = text[i+len("memberlist: "):]
	}
	if reason := reasonOf(text); reason != "" {
		l.refused(reason)
		l.warn(string(reason), warnEvery, "gossip was refused", text)
	} else if strings.Contains(text, noUDP) {
		l.warn(noUDP, noUDPEvery, "gossip reaches a node over TCP only: is UDP blocked between the nodes?", text)
	} else {
		l.log.Debug("gossip", "text", text)
	}
	return len(line), nil
}

func reasonOf(text string) Reason {
	for _, t := range told {
		if strings.Contains(text, t.text) {
			return t.reason
		}
	}
	return ""
}

// warn logs one of many. What memberlist says of an alive message names the member.
func (l *listener) warn(what string, every time.Duration, msg, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if last, ok := l.last[what]; ok && now.Sub(last) < every {
		l.left[what]++
		return
	}
	l.log.Warn(msg, "reason", what, "err", text, "others", l.left[what]) //nolint:sloglint // one of two constants
	l.last[what], l.left[what] = now, 0
}
