package app

import (
	"strconv"

	"github.com/dpserve/dpserve/internal/nearest"
)

// didYouMean returns the hint for a word that is close to found; "" if there is none.
func didYouMean(found string, words []string) string {
	if w := nearest.Word(found, words); w != "" {
		return "did you mean " + strconv.Quote(w) + "?"
	}
	return ""
}
