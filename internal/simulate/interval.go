package simulate

import (
	"fmt"
	"math"
)

// Interval is the mean of values and half of its 95 % confidence interval; 0 for a single value, which says
// nothing of how the others would differ.
type Interval struct {
	Mean float64 `json:"mean"`
	Half float64 `json:"ci95"`
}

// NewInterval is the interval of values: t·s/√n.
func NewInterval(values []float64) Interval {
	n := float64(len(values))
	sum, squares := 0.0, 0.0
	for _, v := range values {
		sum += v
	}
	for _, v := range values {
		squares += (v - sum/n) * (v - sum/n)
	}
	if n < 2 {
		return Interval{Mean: sum}
	}
	return Interval{Mean: sum / n, Half: studentT(len(values)-1) * math.Sqrt(squares/(n-1)/n)}
}

// Text writes it, each number in the format.
func (i Interval) Text(format string) string {
	text := fmt.Sprintf(format, i.Mean)
	if half := fmt.Sprintf(format, i.Half); half != fmt.Sprintf(format, 0.0) {
		text += " ± " + half
	}
	return text
}

// studentT is the 97.5 % quantile of Student's distribution. Above 30 degrees of freedom it is within 0.2 %
// of it.
func studentT(freedom int) float64 {
	table := [...]float64{
		12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
		2.131,
		2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
		2.042,
	}
	if freedom <= len(table) {
		return table[freedom-1]
	}
	return 1.96 + 2.4/float64(freedom)
}
