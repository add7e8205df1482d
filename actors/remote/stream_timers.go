package remote

import (
	"cmp"
	"time"
)

// StreamTimers are the times of the ranks' streams between nodes. Zero values take the defaults.
type StreamTimers struct {
	Heartbeat  time.Duration // of a stream without records, at most half as much later; 250 ms
	Suspect    time.Duration // of silence: the node's ranks are picked last; 1 s
	Out        time.Duration // of silence: the node's ranks are out; 3 s
	BackoffMin time.Duration // first wait between attempts to reach a node, which grows; 50 ms
	BackoffMax time.Duration // longest such wait; 1 s
	Resync     time.Duration // how long a rank may take to answer a request for a snapshot; 1 s
}

func (t StreamTimers) withDefaults() StreamTimers {
	return StreamTimers{
		Heartbeat:  cmp.Or(t.Heartbeat, 250*time.Millisecond),
		Suspect:    cmp.Or(t.Suspect, time.Second),
		Out:        cmp.Or(t.Out, 3*time.Second),
		BackoffMin: cmp.Or(t.BackoffMin, 50*time.Millisecond),
		BackoffMax: cmp.Or(t.BackoffMax, time.Second),
		Resync:     cmp.Or(t.Resync, time.Second),
	}
}

// Messages of a node to all its peers together cost a bounded share of a core: each peer gets at most one
// message every perPeer × peers, with all records that waited. The first message after a pause leaves at
// once. All streams of a process wait for the same beat, because a wake-up costs more than a message.
const (
	perPeer = 500 * time.Microsecond
	maxPace = 40 * time.Millisecond
)

func sendInterval(peers int) time.Duration { return min(time.Duration(peers)*perPeer, maxPace) }

// untilBeat is the time to the next beat of a clock that all streams share.
func untilBeat(every time.Duration) time.Duration {
	if every <= 0 {
		return 0
	}
	return every - time.Duration(time.Now().UnixNano())%every
}

// waitTimer waits; false if done was closed meanwhile.
func waitTimer(done <-chan struct{}, timer *time.Timer, d time.Duration) bool {
	timer.Reset(d)
	select {
	case <-done:
		return false
	case <-timer.C:
		return true
	}
}
