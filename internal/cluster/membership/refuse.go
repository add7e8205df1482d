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
	{"Failed to decode", Malformed},
	{"not supported", Malformed},
	{"invalid msgType", Malformed},
	{"invalid checksum", Malformed},
	{"missing message type", Malformed},
	{"Failed to decompress", Malformed},
}

// silence is in the text about a peer that has connected and said nothing in time, as a node does that stands
// still: nothing of it was refused.
const silence = "i/o timeout"

// wasRemoved is in the text of a refusal that is no reason for a warning: a removed node gossips on until it
// learns of its removal.
const wasRemoved = "was removed from the cluster"

// noUDP is memberlist's line when only TCP works.
const noUDP = "UDP probes failed"

const (
	warnEvery  = time.Second // between two warnings of one reason
	noUDPEvery = time.Minute // between two warnings about the network
	// noUDPAgain is the time within which the same is said of the same node again if UDP is blocked. Once is
	// no reason for a warning: a node that restarts may begin between the probe by UDP and the one by TCP.
	noUDPAgain = 5 * time.Minute
)

// logReader reads memberlist's log. It counts refusals and logs them at most once per second and reason. All
// other lines are logged at debug.
type logReader struct {
	log     *slog.Logger
	refused func(Reason)

	mu      sync.Mutex
	warned  map[string]time.Time // by what the warning is about
	overTCP map[string]time.Time // the last line about each node that only TCP reached, of noUDPAgain
}

func newLogReader(log *slog.Logger, refused func(Reason)) *logReader {
	return &logReader{
		log: log, refused: refused, warned: map[string]time.Time{}, overTCP: map[string]time.Time{},
	}
}

// Write reads one line.
func (l *logReader) Write(line []byte) (int, error) {
	text := string(bytes.TrimSpace(line))
	if i := strings.Index(text, "memberlist: "); i >= 0 {
		text = text[i+len("memberlist: "):]
	}
	reason := reasonOf(text)
	if reason != "" {
		l.refused(reason)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	switch {
	case reason != "" && !strings.Contains(text, wasRemoved) && l.mayWarn(string(reason), warnEvery, now):
		l.log.Warn("gossip was refused", slog.String("reason", string(reason)), slog.String("err", text))
	case strings.Contains(text, noUDP) && l.isRepeated(text, now) && l.mayWarn(noUDP, noUDPEvery, now):
		l.log.Warn("gossip reaches a node over TCP only: is UDP blocked between the nodes?",
			slog.String("err", text))
	default:
		l.log.Debug("gossip", slog.String("text", text))
	}
	return len(line), nil
}

func reasonOf(text string) Reason {
	if strings.Contains(text, silence) {
		return ""
	}
	for _, t := range refusalTexts {
		if strings.Contains(text, t.text) {
			return t.reason
		}
	}
	return ""
}

// mayWarn reports whether the last warning about the same is long enough ago, and notes this one. The caller
// holds mu.
func (l *logReader) mayWarn(about string, every time.Duration, now time.Time) bool {
	if last, ok := l.warned[about]; ok && now.Sub(last) < every {
		return false
	}
	l.warned[about] = now
	return true
}

// isRepeated reports whether the same was said within noUDPAgain. The caller holds mu.
func (l *logReader) isRepeated(text string, now time.Time) bool {
	maps.DeleteFunc(l.overTCP, func(_ string, at time.Time) bool { return now.Sub(at) >= noUDPAgain })
	_, repeated := l.overTCP[text]
	l.overTCP[text] = now
	return repeated
}
