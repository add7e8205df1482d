package app

import (
	"cmp"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// RankRef identifies one attached rank by its engine (URL, and Selector if several ranks share the URL). With
// an empty URL it identifies the rank by its group and number.
type RankRef struct {
	URL         string
	Selector    *int
	Group, Rank int
}

// numbers returns the number of each attached rank in its group, in the order of the file.
func (e *Engine) numbers() []int {
	out, places := make([]int, len(e.Ranks)), map[int]int{}
	for i := range e.Ranks {
		r := &e.Ranks[i]
		out[i] = places[r.Group]
		if places[r.Group]++; r.Number != nil {
			out[i] = *r.Number
		}
	}
	return out
}

// Rank returns the attached engine with the given number in its group, nil if there is none. Ranks are
// numbered in file order, except those with a written number.
func (e *Engine) Rank(group, rank int) *AttachRank {
	for i, n := range e.numbers() {
		if n == rank && e.Ranks[i].Group == group {
			return &e.Ranks[i]
		}
	}
	return nil
}

// EngineModel returns the name under which an attached engine serves the model; "" if the file gives it none
// of its own, so that the engine knows the names that clients send.
func (a *Application) EngineModel(r *AttachRank) string {
	if r.Model == "" && a.Model.Source != a.Model.ID {
		return a.Model.Source
	}
	return r.Model
}

// RankNumbers returns the sorted ranks of a group: 0..dp_size-1. Removed attached ranks leave holes.
func (a *Application) RankNumbers(group int) []int {
	out := make([]int, 0, a.DataParallel.DPSize)
	if a.Engine.Kind != KindAttach || a.DataParallel.Coupling == Lockstep {
		for r := range a.DataParallel.DPSize {
			out = append(out, r)
		}
		return out
	}
	for i, n := range a.Engine.numbers() {
		if a.Engine.Ranks[i].Group == group {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return out
}

// Address identifies the engine of an attached rank: its URL, and the selector if the rank is addressed by
// one.
func (r *AttachRank) Address() string {
	if r.Addressing == "" || r.Addressing == AddressURL {
		return r.URL
	}
	return r.URL + " selector " + strconv.Itoa(r.Selector)
}

// WithRank returns a copy of a with one more attached rank, and that rank's number: the lowest that no rank
// has and busy does not claim, because a rank that drains still has its number. Every other rank keeps its
// number. Errors are *problem.Error: Conflict for an engine that is attached already, and for applications
// whose ranks cannot change.
func (a *Application) WithRank(r AttachRank, busy func(rank int) bool) (*Application, int, error) {
	if err := a.checkChangeable("add a rank"); err != nil {
		return nil, 0, err
	}
	if err := a.CheckAttachable(&r); err != nil {
		return nil, 0, err
	}
	numbers := a.Engine.numbers()
	n := 0
	for slices.Contains(numbers, n) || busy(n) {
		n++
	}
	if n >= MaxDPSize || len(numbers) >= MaxDPSize {
		return nil, 0, problem.New(problem.Conflict, "add a rank: %s has %d of at most %d ranks",
			a.PoolName(), len(numbers), MaxDPSize).
			WithHint("remove one first: dpserve ranks remove %s URL", a.PoolName())
	}
	at := slices.IndexFunc(numbers, func(m int) bool { return m > n })
	if at < 0 {
		at = len(numbers)
	}
	r.Number = nil
	return a.withRanks(slices.Insert(slices.Clone(a.Engine.Ranks), at, r), slices.Insert(numbers, at, n)), n,
		nil
}

// WithoutRank returns a copy of a without one attached rank, and that rank with its number. Every other rank
// keeps its number. Errors are *problem.Error: NotFound for an unknown rank, Conflict for the last rank,
// except of a prefill pool, and for applications whose ranks cannot change.
func (a *Application) WithoutRank(ref RankRef) (*Application, AttachRank, error) {
	if err := a.checkChangeable("remove a rank"); err != nil {
		return nil, AttachRank{}, err
	}
	numbers := a.Engine.numbers()
	at, err := a.findRank(ref, numbers)
	if err != nil {
		return nil, AttachRank{}, err
	}
	// without prefill ranks, decode ranks compute prompts; a service may have no address for a time
	if len(numbers) == 1 && a.Pool != PoolPrefill && len(a.Engine.Services) == 0 {
		return nil, AttachRank{}, problem.New(problem.Conflict, "remove a rank: %s is the last one of %s",
			a.Engine.Ranks[at].Address(), a.PoolName()).
			WithHint("add another one first, or end the application: dpserve delete %s", a.Name)
	}
	gone, n := a.Engine.Ranks[at], numbers[at]
	gone.Number = &n
	ranks := slices.Delete(slices.Clone(a.Engine.Ranks), at, at+1)
	return a.withRanks(ranks, slices.Delete(numbers, at, at+1)), gone, nil
}

// withRanks returns a copy of a with these ranks, which it may change, and their numbers.
func (a *Application) withRanks(ranks []AttachRank, numbers []int) *Application {
	b := *a
	b.Engine.Ranks = ranks
	b.Engine.setNumbers(numbers)
	b.DataParallel.DPSize, b.NumReplicas, b.NumGroups = len(ranks), len(ranks), min(1, len(ranks))
	return &b
}

// setNumbers writes the numbers that differ from a rank's position, so that an application has one form.
func (e *Engine) setNumbers(numbers []int) {
	places := map[int]int{}
	for i := range e.Ranks {
		r := &e.Ranks[i]
		r.Number = nil
		if numbers[i] != places[r.Group] {
			r.Number = &numbers[i]
		}
		places[r.Group]++
	}
}

// checkChangeable refuses applications whose ranks dpserve starts, or whose ranks are one unit.
func (a *Application) checkChangeable(verb string) error {
	err := func(format, hint string, args ...any) error { return conflict(verb+": "+format, hint, args...) }
	switch {
	case a.Engine.Kind != KindAttach:
		return err("%s is of kind %s: dpserve starts its engines, and their number is the file's",
			"change num_replicas and deploy the file", a.PoolName(), a.Engine.Kind)
	case a.DataParallel.Coupling == Lockstep:
		return err("the ranks of %s are one lockstep group, which starts and fails as one",
			"change engine.ranks and deploy the file: all of them start anew", a.PoolName())
	case a.NumGroups > 1:
		return err("%s has %d groups, and groups are of one size",
			"change engine.ranks in every group and deploy the file", a.PoolName(), a.NumGroups)
	}
	return nil
}

func conflict(format, hint string, args ...any) error {
	return problem.New(problem.Conflict, format, args...).WithHint("%s", hint)
}

// CheckAttachable refuses an engine that is attached already, like the rules of a file.
func (a *Application) CheckAttachable(r *AttachRank) error {
	for i, n := range a.Engine.numbers() {
		old := &a.Engine.Ranks[i]
		switch {
		case old.URL != r.URL:
		case old.Address() == r.Address():
			return problem.New(problem.Conflict, "add a rank: %s is attached already, as %s/%d/%d",
				r.Address(), a.PoolName(), old.Group, n).
				WithHint("every rank is an engine of its own; several ranks behind one url are told apart " +
					"by selector")
		case old.Address() == old.URL, r.Address() == r.URL:
			return problem.New(problem.Conflict,
				"add a rank: %s/%d/%d stands for %s, so %s cannot stand for a part or the whole of it",
				a.PoolName(), old.Group, n, old.Address(), r.Address()).
				WithHint("address every rank behind this url by selector, or the url as a whole")
		}
	}
	return nil
}

// findRank returns the index of the rank that ref identifies.
func (a *Application) findRank(ref RankRef, numbers []int) (int, error) {
	ref.URL = strings.TrimSuffix(ref.URL, "/")
	var found []int
	for i := range a.Engine.Ranks {
		if ref.names(&a.Engine.Ranks[i], numbers[i]) {
			found = append(found, i)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return 0, problem.New(problem.NotFound, "there is no rank %s", ref.in(a.PoolName())).
			WithHint("its ranks are listed below").WithDetails(a.rankLines(numbers, nil)...)
	default:
		return 0, problem.New(problem.Conflict, "remove a rank: %d ranks of %s are behind %s", len(found),
			a.PoolName(), ref.URL).
			WithHint("name one of those below by its number or its selector").
			WithDetails(a.rankLines(numbers, found)...)
	}
}

func (ref RankRef) names(r *AttachRank, number int) bool {
	if ref.URL == "" {
		return r.Group == ref.Group && number == ref.Rank
	}
	whole := r.Address() == r.URL
	return r.URL == ref.URL && (ref.Selector == nil || !whole && r.Selector == *ref.Selector)
}

// String returns the engine, or GROUP/RANK.
func (ref RankRef) String() string {
	switch {
	case ref.URL == "":
		return strconv.Itoa(ref.Group) + "/" + strconv.Itoa(ref.Rank)
	case ref.Selector == nil:
		return ref.URL
	default:
		return ref.URL + " selector " + strconv.Itoa(*ref.Selector)
	}
}

// in names the rank of an application: APP/GROUP/RANK, or its engine.
func (ref RankRef) in(app string) string {
	if ref.URL == "" {
		return app + "/" + ref.String()
	}
	return ref.String() + " in " + app
}

// maxRankLines bounds the ranks that an error lists.
const maxRankLines = 20

// rankLines lists ranks as GROUP/RANK ADDRESS, sorted by number: all ranks, or those at the given indexes.
func (a *Application) rankLines(numbers, places []int) []string {
	if places == nil {
		for i := range numbers {
			places = append(places, i)
		}
	}
	slices.SortFunc(places, func(i, j int) int {
		return cmp.Or(cmp.Compare(a.Engine.Ranks[i].Group, a.Engine.Ranks[j].Group),
			cmp.Compare(numbers[i], numbers[j]))
	})
	var out []string
	for _, i := range places[:min(len(places), maxRankLines)] {
		r := &a.Engine.Ranks[i]
		out = append(out, RankRef{Group: r.Group, Rank: numbers[i]}.String()+" "+r.Address())
	}
	return out
}

// ParseRank reads one attached rank, a map like an item of engine.ranks in YAML or JSON, by the rules of a
// file. family and transfer are those of its application; transfer is "" if it has one pool. The error is a
// *problem.Error (InvalidArgument) with every fault.
func ParseRank(text []byte, family, transfer string) (AttachRank, error) {
	return parseItem(text, transfer, func(d *decoder, path string, r *AttachRank) (role string) {
		d.checkRank(family, r, path, taken{})
		checkPD(d, transfer, r, path, taken{})
		return r.Role
	})
}

// ParseService is ParseRank for an item of engine.services.
func ParseService(text []byte, transfer string) (AttachService, error) {
	return parseItem(text, transfer, func(d *decoder, path string, s *AttachService) (role string) {
		d.checkService(s, path, transfer)
		return s.Role
	})
}

// parseItem reads one rank or service; check runs its rules and returns its role.
func parseItem[T any](text []byte, transfer string, check func(d *decoder, path string, r *T) (role string),
) (T, error) {
	const path = "rank"
	d := newDecoder(path)
	var r T
	setDefaults(reflect.ValueOf(&r).Elem())
	if root := d.load(text); root != nil {
		c := cursor{d, root, path}
		c.mark()
		c.readStruct(reflect.ValueOf(&r).Elem())
		if role := check(d, path, &r); transfer == "" && role != RoleBoth {
			d.wrong(join(path, "role"), "the application has no prefill and decode ranks",
				"deploy its file with disaggregation: {transfer: …} first")
		}
	} else if len(d.faults) == 0 {
		d.fault(place{line: 1, col: 1}, path, Fault{
			Message: "nothing is given", Hint: `write {"url": "http://HOST:PORT"}`,
		})
	}
	for _, key := range []string{"rank", "group"} {
		if at := join(path, key); d.has(at) {
			d.wrong(at, "dpserve gives the number", "leave it out")
		}
	}
	if len(d.faults) > 0 {
		var none T
		return none, d.faults.sorted().rankError(path)
	}
	return r, nil
}

// rankError returns f without positions, because the text does not come from a file.
func (f Faults) rankError(path string) error {
	lines := make([]string, len(f))
	for i := range f {
		lines[i] = f[i].Describe()
		if at := strings.TrimPrefix(strings.TrimPrefix(f[i].Path, path), "."); at != "" {
			lines[i] = at + ": " + lines[i]
		}
	}
	err := problem.New(problem.InvalidArgument, "the rank is not as it should be: %s", lines[0])
	err.Hint = f[0].Hint
	if len(lines) > 1 { // a single line is the message already
		err.Details = lines
	}
	return err
}
