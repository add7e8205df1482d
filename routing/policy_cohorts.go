package routing

import "time"

// Cohorts is the policy of lockstep groups. A GroupRule with its goals holds the requests of a group and
// releases them together. What stays outside of that (a request that names a rank, or that a rank has failed)
// goes by lmetric-1. Parameters: ttft_s (2), tpot_s (0.05).
type Cohorts struct {
	LMetric
	TTFT, TPOT time.Duration // the goals
}

func newCohorts(p *params) Policy {
	span := func(name string, def, lo, hi float64) time.Duration {
		return time.Duration(p.number(name, def, lo, hi) * float64(time.Second))
	}
	return Cohorts{
		LMetric: LMetric{PlusOne: true},
		TTFT:    span("ttft_s", 2, 0.001, 3600), TPOT: span("tpot_s", 0.05, 0.0001, 60),
	}
}

func (Cohorts) Name() string { return nameCohorts }

// GroupRule is the rule for the groups of an application.
func (p Cohorts) GroupRule() GroupRule { return NewGroupRule(p.TTFT, p.TPOT) }
