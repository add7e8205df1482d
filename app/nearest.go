package app

import (
	"strconv"
	"strings"
)

// nearest is the word of words that was probably meant by found, or "". Case and the choice of _ or - do not count as
// a difference; otherwise about one edit in three characters is forgiven.
func nearest(found string, words []string) string {
	best, bound := "", max(1, len(found)/3)+1
	for _, w := range words {
		if d := distance(plain(found), plain(w)); d < bound {
			best, bound = w, d
		}
	}
	return best
}

// didYouMean is the hint for found, or "".
func didYouMean(found string, words []string) string {
	if w := nearest(found, words); w != "" {
		return "did you mean " + strconv.Quote(w) + "?"
	}
	return ""
}

func plain(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", "-") }

// distance is the Levenshtein distance of a and b in bytes, with an early answer for lengths too far apart to matter.
func distance(a, b string) int {
	if d := len(a) - len(b); d > maxWord || -d > maxWord {
		return max(d, -d)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// maxWord is the length difference beyond which two words are never taken for each other.
const maxWord = 64
