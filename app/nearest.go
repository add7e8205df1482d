package app

import (
	"strconv"

	"github.com/dpserve/dpserve/internal/nearest"
)

// didYouMean is the hint for found, or "".
func didYouMean(found string, words []string) string {
	if w := nearest.Word(found, words); w != "" {
		return "did you mean " + strconv.Quote(w) + "?"
	}
	return ""
}
