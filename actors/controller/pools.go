package controller

import (
	"cmp"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// An application with prefill and decode ranks is two applications of the state, its pools. This file shows
// and ends the two as the one that users know. Everything else works on each pool alone.

// formerNames lists the stored applications that a deploy ends because their application gets other pools:
// the application with one pool when it gets two, and the other way round.
func formerNames(s *state.State, apps []*app.Application) []string {
	var out []string
	for _, a := range apps {
		former := []string{a.AppName()}
		if a.Pool == "" {
			former = []string{app.PoolName(a.Name, app.PoolPrefill), app.PoolName(a.Name, app.PoolDecode)}
		}
		for _, name := range former {
			// A deploy of pools also ends what another one may put there meanwhile.
			old := s.Apps[name]
			if isFormer := old == nil && a.Pool != "" || old != nil && !old.Deleting; isFormer &&
				!slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	return out
}

// deletion returns the command that ends an application, with both pools if it has two.
func deletion(s *state.State, name string) (state.Command, error) {
	if user, pool := app.SplitPool(name); pool != "" && s.Apps[name] != nil {
		return state.Command{}, problem.New(problem.Conflict, "%s is a pool of %s, and ends with it", name,
			user).WithHint("end both pools with `dpserve delete %s`", user)
	}
	found := state.FindApps(s, name)
	if len(found) == 0 || len(found) == 1 && found[0].Name == name {
		return state.Command{DeleteApp: &state.DeleteApp{Name: name}}, nil
	}
	end := &state.PutApps{}
	for _, a := range found {
		end.End = append(end.End, a.Name)
	}
	return state.Command{PutApps: end}, nil
}

// foldRevisions returns the revisions of applications from those of their pools, which are equal.
func foldRevisions(of map[string]uint64) map[string]uint64 {
	if of == nil {
		return nil
	}
	out := make(map[string]uint64, len(of))
	for name, revision := range of {
		user, _ := app.SplitPool(name)
		out[user] = max(out[user], revision)
	}
	return out
}

// poolOrder is the order in which parts of an application are shown: the prefill pool, the decode pool, and
// what the application was before it had pools.
func poolOrder(name string) int {
	_, pool := app.SplitPool(name)
	return slices.Index([]string{app.PoolPrefill, app.PoolDecode, ""}, pool)
}

// byApplication groups things by the application whose name or pool they carry. Applications are in the order
// of their first part, parts in that of poolOrder.
func byApplication[T any](all []T, nameOf func(*T) string) [][]*T {
	var out [][]*T
	at := map[string]int{}
	for i := range all {
		user, _ := app.SplitPool(nameOf(&all[i]))
		n, ok := at[user]
		if !ok {
			n, at[user] = len(out), len(out)
			out = append(out, nil)
		}
		out[n] = append(out[n], &all[i])
	}
	for _, parts := range out {
		slices.SortFunc(parts, func(a, b *T) int {
			return cmp.Compare(poolOrder(nameOf(a)), poolOrder(nameOf(b)))
		})
	}
	return out
}

// foldParts folds the parts of each application that has pools: fold changes the first part into the whole.
func foldParts[T any](all []T, nameOf func(*T) *string, fold func(whole *T, parts []*T)) []T {
	out := make([]T, 0, len(all))
	for _, parts := range byApplication(all, func(t *T) string { return *nameOf(t) }) {
		whole := *parts[0]
		if user, pool := app.SplitPool(*nameOf(&whole)); pool != "" {
			fold(&whole, parts)
			*nameOf(&whole) = user
		}
		out = append(out, whole)
	}
	return out
}

func foldPlans(apps []client.AppPlan) []client.AppPlan {
	return foldParts(apps, func(a *client.AppPlan) *string { return &a.App },
		func(whole *client.AppPlan, parts []*client.AppPlan) {
			var f impactFold
			whole.Units = nil
			for _, p := range parts {
				f.add(p.App, &p.Impact)
				whole.Units = append(whole.Units, p.Units...)
			}
			whole.Impact = f.impact()
			action, fields := summaryOf(&whole.Impact)
			whole.Action, whole.Fields = string(action), fields
		})
}

func foldChanges(changes []client.Change) []client.Change {
	return foldParts(changes, func(c *client.Change) *string { return &c.App },
		func(whole *client.Change, parts []*client.Change) {
			var f impactFold
			whole.Gone = nil
			for _, p := range parts {
				f.add(p.App, &p.Impact)
				for _, rank := range p.Gone {
					whole.Gone = append(whole.Gone, p.App+"/"+rank)
				}
			}
			whole.Impact = f.impact()
			whole.Action, whole.Fields = summaryOf(&whole.Impact)
		})
}

// impactFold folds what a deploy does to the parts of an application.
type impactFold struct {
	parts         map[string]*client.Impact // by pool; "": the application with one pool
	before, after int
}

func (f *impactFold) add(name string, i *client.Impact) {
	if f.parts == nil {
		f.parts = map[string]*client.Impact{}
	}
	_, pool := app.SplitPool(name)
	f.parts[pool] = i
	f.before, f.after = f.before+i.RanksBefore, f.after+i.RanksAfter
}

// none is the impact on a part that is not there.
var none = client.Impact{Effect: client.EffectUnchanged}

func (f *impactFold) impact() client.Impact {
	out := client.Impact{RanksBefore: f.before, RanksAfter: f.after}
	one, prefill, decode := f.parts[""], cmp.Or(f.parts[app.PoolPrefill], &none),
		cmp.Or(f.parts[app.PoolDecode], &none)
	switch isEnd := prefill.Effect == client.EffectDelete && decode.Effect == client.EffectDelete; {
	case one != nil && one.Effect == client.EffectDelete && isEnd:
		out.Effect = client.EffectDelete
	case one != nil && isEnd:
		out.Effect, out.Reasons = client.EffectRestart, []string{"it has one pool from now on"}
	case one != nil:
		out.Effect = client.EffectRestart
		out.Reasons = []string{"it has prefill and decode ranks from now on"}
	default:
		out.Effect = strongest(prefill.Effect, decode.Effect)
		out.Diffs = foldDiffs(prefill.Diffs, decode.Diffs)
		out.Reasons = foldReasons(prefill, decode)
	}
	return out
}

// strongest returns what the effects on two pools are for their application.
func strongest(a, b client.Effect) client.Effect {
	if a == b {
		return a
	}
	for _, e := range []client.Effect{client.EffectRestart, client.EffectScale} {
		if a == e || b == e {
			return e
		}
	}
	if slices.ContainsFunc([]client.Effect{a, b}, func(e client.Effect) bool {
		return e == client.EffectCreate || e == client.EffectDelete
	}) {
		return client.EffectScale
	}
	return client.EffectUpdate
}

// foldDiffs returns the differences of an application. One that both pools have is the application's; other
// paths begin with the pool.
func foldDiffs(prefill, decode []client.FieldDiff) []client.FieldDiff {
	var out []client.FieldDiff
	for _, d := range prefill {
		if !slices.Contains(decode, d) {
			d.Path = app.PoolPrefill + "." + d.Path
		}
		out = append(out, d)
	}
	for _, d := range decode {
		if !slices.Contains(prefill, d) {
			d.Path = app.PoolDecode + "." + d.Path
			out = append(out, d)
		}
	}
	slices.SortFunc(out, func(a, b client.FieldDiff) int { return strings.Compare(a.Path, b.Path) })
	return out
}

// foldReasons returns the reasons why units restart. A reason that is not that of both pools names its pool.
func foldReasons(prefill, decode *client.Impact) []string {
	var out []string
	add := func(pool string, of, other *client.Impact) {
		for _, why := range of.Reasons {
			isPath := slices.ContainsFunc(of.Diffs, func(d client.FieldDiff) bool { return d.Path == why })
			switch {
			case slices.Contains(other.Reasons, why):
			case isPath:
				why = pool + "." + why
			default:
				why = pool + ": " + why
			}
			if !slices.Contains(out, why) {
				out = append(out, why)
			}
		}
	}
	add(app.PoolPrefill, prefill, decode)
	add(app.PoolDecode, decode, prefill)
	return out
}

// FoldStatuses returns the statuses of applications as users know them, from those of the stored ones: the
// two pools of an application are one status, with the units of both.
func FoldStatuses(stored []client.AppStatus) []client.AppStatus {
	return foldParts(stored, func(s *client.AppStatus) *string { return &s.Name }, foldStatus)
}

// foldStatus folds the parts of an application. Its model, policy and shape are those of its decode pool,
// which its requests are for. A part that ends says nothing about the application unless all of them end.
func foldStatus(out *client.AppStatus, parts []*client.AppStatus) {
	stays := func(s *client.AppStatus) bool { return s.Status != client.StatusDeleting }
	main := parts[0]
	for _, s := range parts {
		_, pool := app.SplitPool(s.Name)
		if pool == app.PoolDecode && (stays(s) || !stays(main)) || !stays(main) && stays(s) {
			main = s
		}
	}
	*out = *main
	out.Units, out.Pools, out.Groups, out.Desired, out.Ready, out.Queued = nil, nil, 0, 0, 0, 0
	out.Message = ""
	for _, s := range parts {
		out.Units = append(out.Units, s.Units...)
		if stays(main) && !stays(s) {
			continue
		}
		out.Status = worst(out.Status, s.Status)
		out.Revision = max(out.Revision, s.Revision)
		out.Groups, out.Desired, out.Ready = out.Groups+s.Groups, out.Desired+s.Desired, out.Ready+s.Ready
		out.Queued += s.Queued
		if s.Message != "" {
			out.Message = strings.TrimPrefix(out.Message+"\n"+s.Message, "\n")
		}
		if _, pool := app.SplitPool(s.Name); pool != "" {
			out.Pools = append(out.Pools, client.PoolStatus{
				Pool: pool, Name: s.Name, Status: s.Status, Policy: s.Policy, Coupling: s.Coupling,
				DPSize: s.DPSize, Groups: s.Groups, Ready: s.Ready, Desired: s.Desired,
			})
		}
	}
}

// worst returns the status of two pools together.
func worst(a, b string) string {
	for _, s := range []string{
		client.StatusDeployFailed, client.StatusUnhealthy, client.StatusDeploying, client.StatusDeleting,
	} {
		if a == s || b == s {
			return s
		}
	}
	return client.StatusRunning
}
