//go:build linux

package main

import "math"

// mean of values, 0 of none.
func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(max(len(values), 1))
}

// halfWidth is half of the 95 % confidence interval of the mean of values (Student's t): t·s/√n. ok is false
// for a single value, which says nothing of how the others would differ.
func halfWidth(values []float64) (half float64, ok bool) {
	n := len(values)
	if n < 2 {
		return 0, false
	}
	average, squares := mean(values), 0.0
	for _, v := range values {
		squares += (v - average) * (v - average)
	}
	return studentT(n-1) * math.Sqrt(squares/float64(n-1)/float64(n)), true
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
