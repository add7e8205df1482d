//go:build linux

package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// list is a flag that takes one value, or several with commas between.
type list[T any] struct {
	values []T
	parse  func(text string) (T, error)
}

// String implements flag.Value.
func (l *list[T]) String() string {
	var words []string
	for _, v := range l.values {
		words = append(words, fmt.Sprint(v))
	}
	return strings.Join(words, ",")
}

// Set implements flag.Value.
func (l *list[T]) Set(text string) error {
	l.values = nil
	for word := range strings.SplitSeq(text, ",") {
		v, err := l.parse(word)
		if err != nil {
			return err
		}
		l.values = append(l.values, v)
	}
	return nil
}

// Bounds of what a flag of the role trace may say.
const (
	leastFactor, mostFactor = 1e-3, 1e6
	mostIngresses           = 1024
	mostLag                 = time.Hour
)

func parseFactor(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || !(v >= leastFactor && v <= mostFactor) {
		return 0, fmt.Errorf("%w: %q is no number from %g to %g", errUsage, text, leastFactor, mostFactor)
	}
	return v, nil
}

func parseIngresses(text string) (int, error) {
	v, err := strconv.Atoi(text)
	if err != nil || v < 1 || v > mostIngresses {
		return 0, fmt.Errorf("%w: %q is no number from 1 to %d", errUsage, text, mostIngresses)
	}
	return v, nil
}

func parseLag(text string) (time.Duration, error) {
	v, err := time.ParseDuration(text)
	if err != nil || v < 0 || v > mostLag {
		return 0, fmt.Errorf("%w: %q is no duration from 0s to %s, as 100ms is", errUsage, text, mostLag)
	}
	return v, nil
}
