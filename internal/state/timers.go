package state

import (
	"cmp"
	"time"
)

// Bounds and waits of the unit state machine.
const (
	MaxStartAttempts    = 3                // first starts that may fail before the unit is failed
	MaxRefusals         = 3                // starts in a row that may find ports taken, before they count
	DefaultStartRetry   = time.Second      // after the first failed start
	DefaultFailedRetry  = 5 * time.Minute  // before a failed unit is tried again
	DefaultRestartMin   = time.Second      // before the first restart after ready
	DefaultRestartMax   = 5 * time.Minute  // before any restart
	DefaultRestartReset = 10 * time.Minute // of being ready, after which restarts count from one again
	DefaultResend       = 2 * time.Second  // of a node's silence, after which an order is sent again

	// spreadPart of a wait is left to chance, so that units that end at one moment do not start at one.
	spreadPart = 0.25
)

// Timers are the waits of the unit state machine. Zero fields mean the defaults.
type Timers struct {
	StartRetry   time.Duration // after a failed first start, doubled per attempt
	FailedRetry  time.Duration // before a failed unit is tried again
	RestartMin   time.Duration // after a failure of a unit that has served, doubled per failure
	RestartMax   time.Duration // upper bound of both
	RestartReset time.Duration // a unit that was ready for this long counts its failures from one again
	Resend       time.Duration // after this silence of a node an order is sent again
}

// WithDefaults replaces zero fields by the defaults.
func (t Timers) WithDefaults() Timers {
	return Timers{
		StartRetry:   orDefault(t.StartRetry, DefaultStartRetry),
		FailedRetry:  orDefault(t.FailedRetry, DefaultFailedRetry),
		RestartMin:   orDefault(t.RestartMin, DefaultRestartMin),
		RestartMax:   orDefault(t.RestartMax, DefaultRestartMax),
		RestartReset: orDefault(t.RestartReset, DefaultRestartReset),
		Resend:       orDefault(t.Resend, DefaultResend),
	}
}

func orDefault(d, def time.Duration) time.Duration { return cmp.Or(max(0, d), def) }

// startDelay is min(StartRetry * 2^(attempt-1), RestartMax).
func (t Timers) startDelay(attempt int) time.Duration {
	return doubleDelay(t.StartRetry, attempt, t.RestartMax)
}

// restartDelay is min(RestartMin * 2^(failures-1), RestartMax).
func (t Timers) restartDelay(failures int) time.Duration {
	return doubleDelay(t.RestartMin, failures, t.RestartMax)
}

func doubleDelay(d time.Duration, n int, limit time.Duration) time.Duration {
	for ; n > 1 && d < limit; n-- {
		d *= 2
	}
	return min(d, limit)
}

// FailedWait is how long a failed unit waits for its next start.
func (t Timers) FailedWait(spread float64) time.Duration { return shorten(t.FailedRetry, spread) }

// shorten returns a wait without the part that chance takes from it.
func shorten(d time.Duration, spread float64) time.Duration {
	return d - time.Duration(float64(d)*spreadPart*min(max(spread, 0), 1))
}

// longestWait is the longest time from now to Machine.Due in a phase.
func (t Timers) longestWait(p Phase) time.Duration {
	switch p {
	case Backoff:
		return t.RestartMax
	case Failed:
		return t.FailedRetry
	default:
		return t.Resend
	}
}
