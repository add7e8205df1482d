package doctor

import (
	"fmt"
	"slices"
	"strings"
)

// Owner is the process that holds something. The zero value is not known: only root sees the processes of
// other users.
type Owner struct {
	PID     int
	Program string
	Ours    bool // it is a dpserve, or an engine that a dpserve started
}

// String names the process.
func (o Owner) String() string {
	if o.PID == 0 {
		return "a process of another user"
	}
	return fmt.Sprintf("%s (process %d)", o.Program, o.PID)
}

// Port is an address at which a node would listen.
type Port struct {
	Use     string // http, admin, node, gossip
	Flag    string // that chooses another address or port
	Network string // tcp or udp
	Address string // HOST:PORT
	Error   string // why it cannot be bound; "" = it is free
	Taken   bool   // something listens there
	Owner   Owner  // of a port that is taken
}

// checkPorts looks at the addresses that a node binds. One that a dpserve holds is in order: it is the
// running node.
func checkPorts(f *Facts) []Finding {
	if len(f.Ports) == 0 {
		return nil
	}
	out := &findings{check: "ports"}
	var fine []string
	for i := range f.Ports {
		p := &f.Ports[i]
		switch {
		case p.Error == "":
			fine = append(fine, p.name()+" free")
		case p.Taken && p.Owner.Ours:
			fine = append(fine, p.name()+" held by "+p.Owner.String())
		case p.Taken && p.Owner.PID == 0 && f.answersLocally():
			fine = append(fine, p.name()+" taken, probably by the dpserve that runs")
		case p.Taken:
			out.fail("end it, or choose another one with "+p.Flag, "%s is taken by %s", p.name(), p.Owner)
		default:
			out.fail("choose an address of this machine with "+p.addressFlag(), "%s cannot be bound: %s",
				p.name(), p.Error)
		}
	}
	return out.orOK("%s", strings.Join(fine, ", "))
}

func (p *Port) name() string {
	name := p.Use + " " + p.Address
	if p.Network == "udp" {
		name += "/udp"
	}
	return name
}

// addressFlag is the flag that chooses the host of the port.
func (p *Port) addressFlag() string {
	if p.Flag == "--node-port" || p.Flag == "--gossip-port" {
		return "--advertise"
	}
	return p.Flag
}

// answersLocally reports whether a node that answered the admin API runs here.
func (f *Facts) answersLocally() bool { return f.Cluster != nil && f.Cluster.Error == "" }

// Span is a range of ports, both ends included.
type Span struct{ Lo, Hi int }

func (s Span) String() string { return fmt.Sprintf("%d-%d", s.Lo, s.Hi) }

// Listener is a listening socket.
type Listener struct {
	Port  int
	Owner Owner
}

// EnginePorts is the range from which engines get their ports, and what the system does with these ports.
type EnginePorts struct {
	Range     Span
	Ephemeral Span       // the kernel gives these to outgoing connections; zero = not known
	Reserved  []Span     // ports of Ephemeral that it does not give away
	Listeners []Listener // within Range, without dpserve and its engines
}

func checkEnginePorts(f *Facts) []Finding {
	p, out := f.EnginePorts, &findings{check: "engine-ports"}
	if p == nil {
		return nil
	}
	if both := p.exposed(); both.Hi > 0 {
		out.fail(fmt.Sprintf("choose another --port-range, or keep the kernel away: `sysctl -w "+
			"net.ipv4.ip_local_reserved_ports=%s` (and a file in /etc/sysctl.d)", both),
			"ports %s of --port-range %s are in the kernel's ephemeral range %s: an outgoing connection may "+
				"take an engine's port", both, p.Range, p.Ephemeral)
	}
	if len(p.Listeners) > 0 {
		names := make([]string, len(p.Listeners))
		for i, l := range p.Listeners {
			names[i] = fmt.Sprintf("%d by %s", l.Port, l.Owner)
		}
		out.warn("end them, or choose another --port-range: a start that meets one is made again elsewhere",
			"other listeners in --port-range %s: %s", p.Range, some(names))
	}
	if p.Ephemeral.Hi == 0 {
		return out.orOK("%s: no other listener", p.Range)
	}
	return out.orOK("%s: no other listener, and the kernel gives none of them to connections", p.Range)
}

// exposed returns the first and the last port of the range that the kernel may give to a connection; zero if
// there is none.
func (p *EnginePorts) exposed() Span {
	var out Span
	for port := max(p.Range.Lo, p.Ephemeral.Lo); port <= min(p.Range.Hi, p.Ephemeral.Hi); port++ {
		holds := func(s Span) bool { return s.Lo <= port && port <= s.Hi }
		if slices.ContainsFunc(p.Reserved, holds) {
			continue
		}
		if out.Lo == 0 {
			out.Lo = port
		}
		out.Hi = port
	}
	return out
}
