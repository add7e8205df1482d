package app

import (
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// maxServices bounds the services of an application.
const maxServices = 16

// serviceSchemes maps the schemes of services to those of their engines.
var serviceSchemes = map[string]string{"dns": "http", "dns+https": "https"}

// IsServiceURL reports whether a URL is that of a service.
func IsServiceURL(text string) bool {
	scheme, _, _ := strings.Cut(text, "://")
	return serviceSchemes[scheme] != ""
}

// IsService reports whether a text that describes a rank or a service is that of a service.
func IsService(text []byte) bool {
	root := newDecoder("rank").load(text)
	if root == nil {
		return false
	}
	if url := root.get("url"); url != nil {
		root = url
	}
	return IsServiceURL(root.text)
}

// parts returns the URL of the service's engines with its name for a host, and the name.
func (s *AttachService) parts() (engines url.URL, host string) {
	scheme, rest, _ := strings.Cut(s.URL, "://")
	u, err := url.Parse(serviceSchemes[scheme] + "://" + rest)
	if err != nil { // Parse and ParseService refuse such a URL
		return url.URL{}, ""
	}
	return *u, u.Hostname()
}

// Host returns the name to resolve.
func (s *AttachService) Host() string {
	_, host := s.parts()
	return host
}

// rank returns the rank at one address of the service.
func (s *AttachService) rank(address netip.Addr) AttachRank {
	u, _ := s.parts()
	port, _ := strconv.ParseUint(u.Port(), 10, 16)
	u.Host = netip.AddrPortFrom(address, uint16(port)).String()
	return AttachRank{
		URL: u.String(), Addressing: AddressURL, Model: s.Model, Role: s.Role, Node: s.Node, Service: s.URL,
	}
}

// Ranks returns the ranks at the addresses of the service, in order. A name with IPv4 and IPv6 addresses has
// two of them for each engine, which is one rank: only IPv4 counts then.
func (s *AttachService) Ranks(addresses []netip.Addr) []AttachRank {
	hasIPv4 := slices.ContainsFunc(addresses, func(a netip.Addr) bool { return a.Unmap().Is4() })
	seen := map[netip.Addr]bool{}
	for _, a := range addresses {
		if a = a.Unmap().WithZone(""); a.Is4() == hasIPv4 {
			seen[a] = true
		}
	}
	var out []AttachRank
	for _, a := range slices.SortedFunc(maps.Keys(seen), netip.Addr.Compare) {
		out = append(out, s.rank(a))
	}
	return out
}

// ServerName returns the name in the certificate of an engine that was found by its service, "" for others.
func (r *AttachRank) ServerName() string {
	if r.Service == "" {
		return ""
	}
	return (&AttachService{URL: r.Service}).Host()
}

// Service returns the service with a URL, nil if there is none.
func (a *Application) Service(url string) *AttachService {
	i := slices.IndexFunc(a.Engine.Services, func(s AttachService) bool { return s.URL == url })
	if i < 0 {
		return nil
	}
	return &a.Engine.Services[i]
}

// WithService returns a copy of a with one more service. Errors are *problem.Error, as of WithRank.
func (a *Application) WithService(s AttachService) (*Application, error) {
	if err := a.checkChangeable("add a service"); err != nil {
		return nil, err
	}
	if a.Service(s.URL) != nil {
		return nil, conflict("add a service: %s is attached to %s already", "nothing is left to do", s.URL,
			a.PoolName())
	}
	if len(a.Engine.Services) >= maxServices {
		return nil, conflict("add a service: %s has %d of at most %d services", "remove one first",
			a.PoolName(), maxServices, maxServices)
	}
	b := *a
	b.Engine.Services = append(slices.Clone(a.Engine.Services), s)
	return &b, nil
}

// WithoutService returns a copy of a without a service and its ranks. Errors are *problem.Error: Conflict if
// nothing else is left of the application.
func (a *Application) WithoutService(url string) (*Application, error) {
	if len(a.Engine.Services) == 1 && a.Pool != PoolPrefill &&
		!slices.ContainsFunc(a.Engine.Ranks, func(r AttachRank) bool { return r.Service != url }) {
		return nil, conflict("remove a service: %s is all that %s has",
			"add engines first, or end the application: dpserve delete "+a.Name, url, a.PoolName())
	}
	b := a.keepRanks(func(r *AttachRank) bool { return r.Service != url })
	b.Engine.Services = slices.DeleteFunc(slices.Clone(a.Engine.Services),
		func(s AttachService) bool { return s.URL == url })
	return b, nil
}

// asInFile returns a copy of a without the ranks that its services have brought.
func (a *Application) asInFile() *Application {
	if len(a.Engine.Services) == 0 {
		return a
	}
	return a.keepRanks(func(r *AttachRank) bool { return r.Service == "" })
}

// keepRanks returns a copy of a with some of its ranks, which keep their numbers.
func (a *Application) keepRanks(keeps func(*AttachRank) bool) *Application {
	var ranks []AttachRank
	var kept []int
	for i, n := range a.Engine.numbers() {
		if keeps(&a.Engine.Ranks[i]) {
			ranks, kept = append(ranks, a.Engine.Ranks[i]), append(kept, n)
		}
	}
	return a.withRanks(ranks, kept)
}

// WithServiceRanksOf returns a, which comes from a file, with the ranks that the services of old have brought
// and that a still wants: a deploy of the same file changes none of them. They keep their numbers, unless the
// file gives these to others.
func (a *Application) WithServiceRanksOf(old *Application) *Application {
	out := a
	for i, n := range old.Engine.numbers() {
		r := old.Engine.Ranks[i]
		s := a.Service(r.Service)
		if s == nil || s.Role != r.Role || out.CheckAttachable(&r) != nil {
			continue
		}
		r.Model, r.Node = s.Model, s.Node
		isFree := !slices.Contains(out.Engine.numbers(), n)
		isOther := func(m int) bool { return isFree && m != n || !isFree && old.Engine.Rank(0, m) != nil }
		if next, _, err := out.WithRank(r, isOther); err == nil {
			out = next
		}
	}
	return out
}

// checkServices runs the rules of engine.services. transfer is "" if the application has one pool.
func (a *draft) checkServices(transfer string) {
	const key = "engine.services"
	if !a.isSound(key) {
		return
	}
	if n := len(a.Engine.Services); n == 0 || n > maxServices {
		a.refuse(key, "", strconv.Itoa(n)+" services", "1 to "+strconv.Itoa(maxServices)+" services", "")
	}
	urls := taken{}
	for i := range a.Engine.Services {
		at := a.at(index(key, i))
		a.d.checkService(&a.Engine.Services[i], at, transfer)
		a.d.claim(urls, at+".url", "service", a.Engine.Services[i].URL)
	}
	sizes := []string{"data_parallel.dp_size", "num_replicas", "num_groups", "autoscaling_config"}
	for _, size := range sizes {
		if a.has(size) && a.isGood(size) {
			a.wrong(size, "the addresses of the services say how many ranks there are", "leave it out")
		}
	}
	if a.DataParallel.Coupling == Lockstep && a.isGood("data_parallel.coupling") {
		a.wrong("data_parallel.coupling", "the ranks of a lockstep group cannot come and go",
			"list them in engine.ranks, or leave coupling out")
	}
	for i := range a.Engine.Ranks {
		if at := index("engine.ranks", i) + ".group"; a.Engine.Ranks[i].Group != 0 && a.isGood(at) {
			a.wrong(at, "an application with services has one group", "leave group out")
		}
	}
}

// checkService runs the rules of one service.
func (d *decoder) checkService(s *AttachService, path, transfer string) {
	s.URL = strings.TrimSuffix(s.URL, "/")
	if at := path + ".url"; d.isSound(at) {
		u, host := s.parts()
		switch {
		case !IsServiceURL(s.URL) || u.User == nil && (host == "" || u.Port() == ""):
			d.unlike(at, strconv.Quote(s.URL), "dns://HOST:PORT or dns+https://HOST:PORT", "")
		default:
			d.checkURL(at, u.String())
		}
	}
	if fields := pdFields(transfer); s.Role == RolePrefill && len(fields) > 0 && d.isGood(path+".role") {
		d.wrong(path+".role", "transfer "+transfer+" needs pd."+fields[0]+" of each prefill rank",
			"list the prefill engines in engine.ranks")
	}
}
