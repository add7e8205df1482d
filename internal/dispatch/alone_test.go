package dispatch

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestPlanOfOneLeg: what follows from the end of the only leg of a request.
func TestPlanOfOneLeg(t *testing.T) {
	const started = "start; local d1;"
	for _, x := range []struct {
		name     string
		change   func(c *Config)
		lockstep bool
		before   string // events whose commands do not matter here
		events   string
		want     string
	}{
		{
			name: "an answer", events: started + "first d1; done d1",
			want: "pick d; ask d1; relay; release d1 ok; count none ok",
		},
		{name: "full is no failure", before: started, events: "refused d1 full", want: "pick d"},
		{name: "four ranks refuse", before: "start; local d1; refused d1; local d2; refused d2; local d3; " +
			"refused d3; local d4", events: "refused d4", want: "answer own no_lease; count none failed"},
		{
			name: "refusals are no attempts", before: "start; local d1; refused d1; local d2; refused d2; " +
				"local d3; " +
				"refused d3; local d4", events: "error d4",
			want: "release d4 engine_error charged; pick d pays",
		},
		{
			name: "the rank is slow to admit", before: started, events: "refused d1 overloaded",
			want: "pick d",
		},
		{
			name: "its time is over", before: started, events: "refused d1 expired",
			want: "answer own expired; count none failed",
		},
		{
			name: "a node is not reached", before: started, events: "node_unreachable d1; none",
			want: "suspect d1; release d1 node_unreachable; pick d; answer no-rank; " +
				"count none failed",
		},
		{
			name: "no connection", before: started, events: "nodial d1",
			want: "release d1 connection_refused; pick d",
		},
		{
			name: "500", before: started, events: "says d1 error 5; error d1 5",
			want: "release d1 engine_error charged; pick d pays",
		},
		{
			name: "500 of a rank that is lost", before: started, events: "error d1 lost",
			want: "release d1 engine_error; pick d",
		},
		{
			name: "500 of two ranks, in other words", before: started + "error d1 5; local d2;",
			events: "says d2 error 6; error d2 6", want: "release d2 engine_error; pick d pays",
		},
		{
			name:   "500 of two ranks in the same words is about the request",
			before: started + "error d1 5; local d2;",
			events: "says d2 error 5; error d2 5",
			want:   "relay; release d2 engine_error; pardon d1; count none failed",
		},
		{
			name: "500 of two ranks without words", before: started + "error d1; local d2;",
			events: "says d2 error; error d2", want: "release d2 engine_error; pick d pays",
		},
		{
			name: "500 of the last attempt", before: started + "error d1 5; local d2; error d2 6; local d3;",
			events: "says d3 error 7; error d3 7",
			want:   "relay; release d3 engine_error; count none failed",
		},
		{
			name: "500, and no other rank or no budget", before: started + "error d1 5;", events: "none",
			want: "answer words engine_error; count none failed",
		},
		{
			name: "500, and no room in time", before: started + "error d1 5;", events: "waited",
			want: "answer no-rank; count none failed",
		},
		{
			name: "500 after a reset: no words", before: started + "cut d1; local d2; error d2 5;",
			events: "none",
			want:   "answer own engine_error; count none failed",
		},
		{
			name: "400", before: started, events: "says d1 rejected 5; rejected d1 5",
			want: "relay; release d1 client_error; count none rejected",
		},
		{
			name: "401, and a sibling answers", before: started,
			events: "says d1 rank_error; rank_error d1", want: "release d1 rank_error charged; pick d",
		},
		{
			name: "401 of a second rank", before: started + "rank_error d1; local d2;",
			events: "says d2 rank_error; rank_error d2",
			want:   "relay; release d2 rank_error; pardon d1; count none rejected",
		},
		{
			name:   "only what two ranks have said is taken back",
			before: started + "empty d1; local d2; error d2 5; local d3;",
			events: "says d3 error 5; error d3 5",
			want:   "relay; release d3 engine_error; count none failed",
		},
		{
			name: "408", before: started, events: "says d1 engine_timeout; engine_timeout d1",
			want: "release d1 engine_timeout; pick d pays",
		},
		{
			name: "busy", before: started, events: "says d1 busy; busy d1; local d1",
			want: "release d1 engine_busy; pick d; ask d1",
		},
		{
			name: "busy, and no room in time", before: started + "busy d1;", events: "waited",
			want: "answer words engine_busy; count none failed",
		},
		{
			name: "busy counts more than an error after it", before: started + "busy d1; local d2; error d2;",
			events: "none", want: "answer words engine_busy; count none failed",
		},
		{
			name: "malformed", before: started, events: "malformed_answer d1",
			want: "release d1 malformed_answer charged; pick d pays",
		},
		{name: "empty", before: started, events: "empty d1", want: "release d1 empty charged; pick d pays"},
		{
			name: "aborted by a rank that ends", before: started, events: "aborted d1",
			want: "release d1 aborted; pick d",
		},
		{
			name: "no first token", before: started, events: "first_token_timeout d1",
			want: "release d1 first_token_timeout charged; pick d pays",
		},
		{
			name: "the process stood still", before: started, events: "stood_still d1",
			want: "release d1 stood_still; pick d",
		},
		{
			name: "no file", before: started, events: "no_files d1",
			want: "release d1 no_files; answer own no_files; count none failed",
		},
		{
			name: "the client leaves", before: started, events: "client_gone d1",
			want: "release d1 client_gone; count none gone",
		},
		{
			name: "the client's time is over", before: started, events: "deadline_exceeded d1",
			want: "release d1 deadline_exceeded; answer deadline; count none deadline",
		},
		{
			name: "this process ends", before: started, events: "drained d1",
			want: "release d1 drained; answer own drained; count none failed",
		},

		{name: "one death", before: started, events: "cut d1", want: "release d1 reset; pick d"},
		{
			name: "two deaths", before: started + "cut d1; local d2;", events: "cut d2",
			want: "release d2 reset; answer two-died; count none failed",
		},
		{
			name: "a death and a dead core", before: started + "engine_dead d1; local d2;", events: "cut d2",
			want: "release d2 reset; answer two-died; count none failed",
		},
		{
			name: "two engines that failed", before: started + "unit_lost d1 failed; local d2;",
			events: "unit_lost d2 failed",
			want:   "release d2 unit_lost; answer two-died; count none failed",
		},
		{
			name: "two ranks that are gone", before: started + "unit_lost d1; local d2;",
			events: "unit_lost d2",
			want:   "release d2 unit_lost; pick d",
		},
		{
			name: "two ranks of one unit are one death", lockstep: true,
			before: started + "cut d1; local d2;",
			events: "cut d2", want: "release d2 reset; pick d",
		},

		{
			name: "lost in its stream", before: started + "first d1;", events: "upstream_lost d1",
			want: "release d1 upstream_lost charged; answer lost; count none lost",
		},
		{
			name:   "lost after another failure: one charge",
			before: started + "error d1 5; local d2; first d2;",
			events: "upstream_lost d2", want: "release d2 upstream_lost; answer lost; count none lost",
		},
		{
			name: "an error event in its stream", before: started + "first d1;", events: "error_event d1",
			want: "release d1 error_event; count none ok",
		},
		{
			name: "drained in its stream", before: started + "first d1;", events: "drained d1",
			want: "release d1 drained; answer lost; count none lost",
		},
		{
			name: "the client leaves in its stream", before: started + "first d1;", events: "client_gone d1",
			want: "release d1 client_gone; count none gone",
		},

		{
			name: "twice on one rank", change: func(c *Config) { c.PerRank = 2 }, before: started,
			events: "error d1 5; local d1", want: "release d1 engine_error charged; pick d pays; ask d1",
		},
		{
			name: "one attempt", change: func(c *Config) { c.Attempts = 1 }, before: started,
			events: "says d1 error 5; error d1 5",
			want:   "relay; release d1 engine_error charged; count none failed",
		},
	} {
		t.Run(x.name, func(t *testing.T) {
			cfg := Config{IsAlone: true, Attempts: 3, PerRank: 1, Refusals: 4}
			if x.change != nil {
				x.change(&cfg)
			}
			s := newScript(t, cfg)
			s.isLockstep = x.lockstep
			s.play(x.before)
			s.out = nil
			s.play(x.events)
			assert.Equal(t, x.want, strings.Join(s.out, "; "))
		})
	}
}
