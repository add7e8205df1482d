package membership

import (
	"bytes"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"
)

// Reason says why a gossip message was refused: a closed list.
type Reason string

// The reasons.
const (
	BadKey     Reason = "key"       // not encrypted, or with another key
	BadCluster Reason = "cluster"   // another cluster, or a removed node
	Malformed  Reason = "malformed" // encrypted with our key, but not readable
	Conflict   Reason = "conflict"  // one name at two addresses
)

// refusalTexts maps lines of memberlist's log to reasons. memberlist reports refusals in no other way.
var refusalTexts = []struct {
	text   string
	reason Reason
}{
	{"could decrypt the message", BadKey},
	{"to decrypt", BadKey},
	{"decrypt empty payload", BadKey},
	{"remote state is not encrypted", BadKey},
	{"Decrypt packet failed", BadKey},
	{"stream label header", BadKey}, // the first bytes of a peer that is not memberlist
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

// justRemoved is in the text of a refusal that is to be expected for a moment: see removalGrace.
const justRemoved = "was removed from the cluster a moment ago"

// noUDP is memberlist's line when only TCP works.
const noUDP = "UDP probes failed"

// warnEvery is the least time between two warnings of one reason; noUDPEvery that of warnings about the
// network.
const (
	warnEvery  = time.Second
	noUDPEvery = time.Minute
	// noUDPAgain is the time within which the same is said of the same node again if UDP is blocked. Once is
	// no reason for a warning: a node that restarts may begin between the probe by UDP and the one by TCP.
	noUDPAgain = 5 * time.Minute
)

// logReader reads memberlist's log. It counts refusals and logs them at most once per second and reason. All
// other lines are logged at debug.
type logReader struct {
	log     *slog.Logger
	refused func(Reason)

	mu   sync.Mutex
	last map[string]time.Time
	left map[string]int // refusals since the last line
	// the last line about each node that only TCP reached, by its text, of the last noUDPAgain
	overTCP map[string]time.Time
}

func newLogReader(log *slog.Logger, refused func(Reason)) *logReader {
	return &logReader{
		log: log, refused: refused, last: map[string]time.Time{}, left: map[string]int{},
		overTCP: map[string]time.Time{},
	}
}

// Write reads one line.
func (l *logReader) Write(line []byte) (int, error) {
	text := string(bytes.TrimSpace(line))
	if i := strings.Index(text, "memberlist: "); i >= 0 {
		text = text[i+len("memberlist: "):]
	}
	if reason := reasonOf(text); reason != "" {
		l.refused(reason)
		if strings.Contains(text, justRemoved) {
			l.log.Debug("gossip of a node that was just removed was ignored", "err", text)
			return len(line), nil
		}
		l.warn(string(reason), warnEvery, "gossip was refused", text)
	} else if strings.Contains(text, noUDP) && l.isRepeated(text) {
		l.warn(noUDP, noUDPEvery, "gossip reaches a node over TCP only: is UDP blocked between the nodes?",
			text)
	} else {
		l.log.Debug("gossip", "text", text)
	}
	return len(line), nil
}

// isRepeated reports whether the same was said within noUDPAgain.
func (l *logReader) isRepeated(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(l.overTCP, func(_ string, at time.Time) bool { return now.Sub(at) >= noUDPAgain })
	_, repeated := l.overTCP[text]
	l.overTCP[text] = now
	return repeated
}

func reasonOf(text string) Reason {
	for _, t := range refusalTexts {
		if strings.Contains(text, t.text) {
			return t.reason
		}
	}
	return ""
}

// warn logs at most one line per reason and time. memberlist's line about an alive message names the member.
func (l *logReader) warn(what string, every time.Duration, msg, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if last, ok := l.last[what]; ok && now.Sub(last) < every {
		l.left[what]++
		return
	}
	l.log.Warn(msg, "reason", what, "err", text, "others", l.left[what]) //nolint:sloglint // two constants
	l.last[what], l.left[what] = now, 0
}
