package attach

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Rank is one rank to attach.
type Rank struct {
	URL      string
	Selector int // what requests send to name it; -1 = the URL is enough
	number   int // in its group, as its engine tells it
}

// Layout is what a set of engines looks like as one application.
type Layout struct {
	Ranks      []Rank
	IsLockstep bool   // they are one group: when one fails, the others cannot go on
	Note       string // to the person who typed the URLs; "" = nothing to say
}

// Arrange finds the ranks behind the engines of a family. Engines that tell different numbers are ranks of
// one data parallel group; independent engines all tell 0, or nothing.
func Arrange(family string, engines []Found) Layout {
	var l Layout
	isSilent := false
	for _, f := range engines {
		if family == OpenAI || len(f.Ranks) == 0 {
			isSilent = true
			l.Ranks = append(l.Ranks, Rank{URL: f.URL, Selector: -1})
			continue
		}
		for place, number := range f.Ranks {
			r := Rank{URL: f.URL, Selector: number, number: number}
			switch {
			case len(f.Ranks) == 1:
				r.Selector = -1
			case f.CountsFromZero:
				r.Selector = place
			}
			l.Ranks = append(l.Ranks, r)
		}
	}
	numbers := make([]int, len(l.Ranks))
	for i, r := range l.Ranks {
		numbers[i] = r.number
	}
	slices.Sort(numbers)
	switch {
	case numbers[len(numbers)-1] == 0:
	case isSilent:
		l.Note = fmt.Sprintf("some engines say that they are ranks of a group (%s), others do not: they are "+
			"attached as independent ranks", join(numbers))
	case len(slices.Compact(slices.Clone(numbers))) < len(numbers):
		l.Note = fmt.Sprintf("the engines say that they are ranks %s, so they are of several groups: they "+
			"are attached as independent ranks; write an app.yaml with a group for each rank and coupling: "+
			"lockstep", join(numbers))
	default:
		l.IsLockstep = true
		slices.SortStableFunc(l.Ranks, func(a, b Rank) int { return cmp.Compare(a.number, b.number) })
		l.Note = fmt.Sprintf("the engines say that they are ranks %s of one lockstep group: when one fails, "+
			"all of them are out of routing until it is back", join(numbers))
		if missing := without(numbers); len(missing) > 0 {
			l.Note += "; rank " + join(missing) + " of the group is not among them, attach it too"
		}
	}
	return l
}

// without lists the numbers below the highest one that are missing; numbers are ascending.
func without(numbers []int) []int {
	var out []int
	for n := range numbers[len(numbers)-1] {
		if _, ok := slices.BinarySearch(numbers, n); !ok {
			out = append(out, n)
		}
	}
	return out
}

// maxListed is how many numbers a note lists.
const maxListed = 16

func join(numbers []int) string {
	listed := fmt.Sprint(numbers[:min(len(numbers), maxListed)])
	text := strings.Trim(strings.ReplaceAll(listed, " ", ", "), "[]")
	if more := len(numbers) - maxListed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
