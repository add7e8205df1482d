package app

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

const (
	maxNameBytes = 256 // of a model id, an alias, an adapter

	ruleLabel = "a DNS label: 1 to 63 of a-z, 0-9 and -, not at the ends"
)

var (
	dnsLabel    = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	routePrefix = regexp.MustCompile(`^(/[A-Za-z0-9._~-]+)+$`)
)

// check runs the rules of one application and fills in the defaults that depend on other keys.
func (d *decoder) check(a *draft) {
	d.checkName(a)
	d.checkRoute(a)
	d.checkModel(a)
	d.checkEngine(a)
	d.settleSizes(a)
	d.settleCoupling(a)
	if a.Routing.Policy == "" {
		a.Routing.Policy = DefaultPolicy(a.DataParallel.Coupling)
	}
	d.settleNumbers(a)
	d.settleResources(a)
}

// need records a fault if a key is missing. It records none if a fault at a parent explains the absence.
func (d *decoder) need(around, key, hint string) bool {
	path := join(around, key)
	if d.has(path) || !d.isGood(path) {
		return d.isGood(path)
	}
	d.broken(path, Fault{Message: "the key " + key + " is missing or empty", Hint: hint})
	return false
}

func (d *decoder) checkName(a *draft) {
	if d.need(a.path, "name", "name the application, for example demo") && !dnsLabel.MatchString(a.Name) {
		d.broken(a.path+".name", Fault{Found: strconv.Quote(a.Name), Wanted: ruleLabel})
	}
}

func (d *decoder) checkRoute(a *draft) {
	path := a.path + ".route_prefix"
	if a.RoutePrefix == "/" || !d.isGood(path) {
		return
	}
	dots := strings.Contains(a.RoutePrefix+"/", "/./") || strings.Contains(a.RoutePrefix+"/", "/../")
	if dots || !routePrefix.MatchString(a.RoutePrefix) {
		d.broken(path, Fault{Found: strconv.Quote(a.RoutePrefix),
			Wanted: "/ or a path like /team/chat without a slash at its end"})
	}
}

func (d *decoder) checkModel(a *draft) {
	path := a.path + ".model"
	if !d.need(a.path, "model", "write model: {id: NAME}") {
		return
	}
	if d.need(path, "id", "it is what clients send as \"model\"") {
		d.checkServed(path+".id", a.Model.ID)
	}
	for i, alias := range a.Model.Aliases {
		d.checkServed(index(path+".aliases", i), alias)
	}
	for i, adapter := range a.Model.Adapters {
		at := index(path+".adapters", i)
		if d.need(at, "id", "it is what clients send as \"model\"") {
			d.checkServed(at+".id", adapter.ID)
		}
		d.need(at, "source", "it is what the engine loads")
	}
	if !d.has(path + ".source") {
		a.Model.Source = a.Model.ID
	}
	if a.Model.Source == "" && d.has(path+".source") {
		d.broken(path+".source", Fault{Found: `""`, Wanted: "what the engine loads: a repository or a path",
			Hint: "leave it out to use the id"})
	}
}

// checkServed checks a name that clients send as "model".
func (d *decoder) checkServed(path, name string) {
	bad := strings.ContainsFunc(name, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) })
	if d.isGood(path) && (name == "" || len(name) > maxNameBytes || bad) {
		d.broken(path, Fault{Found: strconv.Quote(name),
			Wanted: fmt.Sprintf("1 to %d visible characters without blanks", maxNameBytes)})
	}
}

// checkTogether runs the rules over all applications: two applications must not share a name or an address.
func (d *decoder) checkTogether(drafts []*draft) {
	names, routes, models, servers := taken{}, taken{}, taken{}, taken{}
	for _, a := range drafts {
		d.claim(names, a.path+".name", "application name", a.Name)
		if a.RoutePrefix != "/" {
			d.claim(routes, a.path+".route_prefix", "route prefix", a.RoutePrefix)
		}
		d.claimModels(models, a)
		d.shareServers(servers, a)
	}
}

// taken maps a value to the path that has it.
type taken map[string]string

func (d *decoder) claim(by taken, path, what, value string) {
	if value == "" || !d.isGood(path) {
		return
	}
	if first, ok := by[value]; ok {
		d.broken(path, Fault{
			Message: fmt.Sprintf("%s %s is taken by %s", what, strconv.Quote(value), first),
			Hint:    "choose another one",
		})
		return
	}
	by[value] = path
}

func (d *decoder) claimModels(by taken, a *draft) {
	path := a.path + ".model"
	d.claim(by, path+".id", "model name", a.Model.ID)
	for i, alias := range a.Model.Aliases {
		d.claim(by, index(path+".aliases", i), "model name", alias)
	}
	for i, adapter := range a.Model.Adapters {
		at := index(path+".adapters", i) + ".id"
		d.claim(by, at, "model name", adapter.ID)
		if adapter.ID != "" && a.Model.ID != "" {
			d.claim(by, at, "model name", a.Model.ID+":"+adapter.ID)
		}
	}
}

// shareServers warns if two applications attach the same server: each counts only its own load there.
func (d *decoder) shareServers(by taken, a *draft) {
	for i, r := range a.Engine.Ranks {
		path := index(a.path+".engine.ranks", i) + ".url"
		first, ok := by[r.URL]
		if ok && r.URL != "" && parentApp(first) != a.path {
			d.warn(path, "the engine is attached by "+parentApp(first)+" too",
				"each application counts only its own load there")
		}
		if !ok {
			by[r.URL] = path
		}
	}
}

// parentApp shortens a path to applications[N].
func parentApp(path string) string { return path[:strings.IndexByte(path, ']')+1] }
