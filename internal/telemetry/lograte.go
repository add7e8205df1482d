package telemetry

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Bounds of LimitLines.
const (
	linesPerSecond = 50                // of one cause; more are counted, and one line gives the number
	linesWindow    = time.Second       // of linesPerSecond, from a cause's first line
	maxLineCauses  = 256               // causes that are counted apart; further ones share one count
	causeAttr      = "cause"           // the attribute that tells lines of one message apart
	leftOutText    = "%s … %d more"    // message of the first line that was left out, number
	otherCauses    = "other log lines" // message and cause of what exceeds maxLineCauses
)

// LimitLines returns a handler that passes 50 lines per second of each cause on to next, and then one line
// that says how many more there were. A cause is a message with its attribute "cause". Lines below
// slog.LevelInfo are not limited. A client that opens and cancels thousands of requests per second then costs
// the log a few kilobytes per second instead of megabytes.
func LimitLines(next slog.Handler) slog.Handler {
	return limitedHandler{Handler: next, rates: &lineRates{causes: map[lineCause]*lineRate{}}}
}

// limitedHandler is the handler of LimitLines. Handlers derived from it share its counts.
type limitedHandler struct {
	slog.Handler

	rates *lineRates
}

// Handle implements slog.Handler.
func (h limitedHandler) Handle(ctx context.Context, r slog.Record) error {
	//nolint:contextcheck // the report of what is left out comes after the line's request
	if r.Level >= slog.LevelInfo && !h.rates.admits(h.Handler, &r) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h limitedHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return limitedHandler{h.Handler.WithAttrs(attrs), h.rates}
}

// WithGroup implements slog.Handler.
func (h limitedHandler) WithGroup(name string) slog.Handler {
	return limitedHandler{h.Handler.WithGroup(name), h.rates}
}

// lineCause is what lines have in common that are counted together.
type lineCause struct{ message, cause string }

// lineRate counts the lines of one cause in its current window.
type lineRate struct {
	began   time.Time
	lines   int // that were passed on
	leftOut int
}

// lineRates counts lines. Safe for concurrent use.
type lineRates struct {
	mu     sync.Mutex
	causes map[lineCause]*lineRate // at most maxLineCauses, and one more for all others
}

// admits counts a line; false: it is left out. The first line that is left out starts the timer that reports
// their number to next at the end of the window.
func (l *lineRates) admits(next slog.Handler, r *slog.Record) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	cause, rate := l.rateOf(causeOf(r), now)
	if rate.lines < linesPerSecond {
		rate.lines++
		return true
	}
	if rate.leftOut++; rate.leftOut == 1 {
		level := r.Level
		time.AfterFunc(rate.began.Add(linesWindow).Sub(now), func() { l.report(next, level, cause) })
	}
	return false
}

// rateOf returns the counts of a cause. The caller holds mu.
func (l *lineRates) rateOf(cause lineCause, now time.Time) (lineCause, *lineRate) {
	rate := l.causes[cause]
	if rate == nil && len(l.causes) >= maxLineCauses {
		for c, old := range l.causes {
			if old.isOver(now) {
				delete(l.causes, c)
			}
		}
		if len(l.causes) >= maxLineCauses {
			cause = lineCause{message: otherCauses}
			rate = l.causes[cause]
		}
	}
	if rate == nil || rate.isOver(now) {
		rate = &lineRate{began: now}
		l.causes[cause] = rate
	}
	return cause, rate
}

// isOver says that the window has ended and its lines that were left out are reported.
func (r *lineRate) isOver(now time.Time) bool {
	return r.leftOut == 0 && now.Sub(r.began) >= linesWindow
}

// report ends a window and logs the number of lines that were left out in it.
func (l *lineRates) report(next slog.Handler, level slog.Level, cause lineCause) {
	l.mu.Lock()
	n := l.causes[cause].leftOut
	delete(l.causes, cause)
	l.mu.Unlock()
	r := slog.NewRecord(time.Now(), level, fmt.Sprintf(leftOutText, cause.message, n), 0)
	if cause.cause != "" {
		r.AddAttrs(slog.String(causeAttr, cause.cause))
	}
	_ = next.Handle(context.Background(), r) // a log that cannot be written has nowhere to say so
}

// causeOf is the cause of a line.
func causeOf(r *slog.Record) lineCause {
	c := lineCause{message: r.Message}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == causeAttr {
			c.cause = a.Value.String()
		}
		return c.cause == ""
	})
	return c
}
