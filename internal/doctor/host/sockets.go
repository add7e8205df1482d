package host

import (
	"cmp"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/process"
)

// tryPorts tries to bind each address, and finds out who has those that are taken.
func tryPorts(ctx context.Context, wanted []doctor.Port, h *holders) []doctor.Port {
	out := slices.Clone(wanted)
	for i := range out {
		p := &out[i]
		if err := bind(ctx, p.Network, p.Address); err != nil {
			p.Error, p.Taken = plain(err), errors.Is(err, syscall.EADDRINUSE)
		}
		if p.Taken {
			p.Owner = h.find(p.Network, p.Address)
		}
	}
	return out
}

// bind binds an address for a moment.
func bind(ctx context.Context, network, address string) error {
	var config net.ListenConfig
	if network == "udp" {
		c, err := config.ListenPacket(ctx, network, address)
		if err != nil {
			return err
		}
		return c.Close()
	}
	l, err := config.Listen(ctx, network, address)
	if err != nil {
		return err
	}
	return l.Close()
}

// enginePorts looks at the ports of engines; nil = this system does not list its sockets.
func enginePorts(of doctor.Span, h *holders) *doctor.EnginePorts {
	if _, err := os.Stat(filepath.Join(procRoot, "net", "tcp")); err != nil {
		return nil
	}
	out := &doctor.EnginePorts{Range: of}
	const folder = procRoot + "/sys/net/ipv4/"
	if text, err := os.ReadFile(folder + "ip_local_port_range"); err == nil {
		if f := strings.Fields(string(text)); len(f) == 2 {
			out.Ephemeral, _ = parseSpan(f[0] + "-" + f[1])
		}
	}
	if text, err := os.ReadFile(folder + "ip_local_reserved_ports"); err == nil {
		for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
			if span, ok := parseSpan(part); ok {
				out.Reserved = append(out.Reserved, span)
			}
		}
	}
	for _, s := range process.Listening("self", "tcp") {
		if s.Port < of.Lo || of.Hi < s.Port {
			continue
		}
		if owner := h.of(s.Inode); !owner.Ours {
			out.Listeners = append(out.Listeners, doctor.Listener{Port: s.Port, Owner: owner})
		}
	}
	slices.SortFunc(out.Listeners, func(a, b doctor.Listener) int { return a.Port - b.Port })
	return out
}

// parseSpan reads LO-HI, or one port.
func parseSpan(text string) (doctor.Span, bool) {
	first, last, isRange := strings.Cut(text, "-")
	lo, err := strconv.Atoi(first)
	hi := lo
	if err == nil && isRange {
		hi, err = strconv.Atoi(last)
	}
	return doctor.Span{Lo: lo, Hi: hi}, err == nil && 0 < lo && lo <= hi && hi <= 1<<16-1
}

// programName begins the name of every file of this program, such as dpserve-v0.2.
const programName = "dpserve"

// holders knows which process holds a socket. It reads the processes once, when it is first asked.
type holders struct {
	self   string         // the path of this program; "" = not known
	pids   map[string]int // by inode; nil = not read yet
	owners map[int]doctor.Owner
}

func newHolders() *holders {
	h := &holders{owners: map[int]doctor.Owner{}}
	if path, err := os.Executable(); err == nil {
		h.self = path
	}
	return h
}

// find returns the process that keeps an address from being bound.
func (h *holders) find(network, address string) doctor.Owner {
	for _, s := range process.Listening("self", network) {
		if s.Blocks(address) {
			return h.of(s.Inode)
		}
	}
	return doctor.Owner{}
}

// of returns the process that holds a socket. Those of other users are not seen.
func (h *holders) of(inode string) doctor.Owner {
	if h.pids == nil {
		h.pids = map[string]int{}
		for _, s := range process.All() {
			for _, inode := range process.OpenSockets(s.PID) {
				h.pids[inode] = s.PID
			}
		}
	}
	pid, ok := h.pids[inode]
	if !ok {
		return doctor.Owner{}
	}
	if _, known := h.owners[pid]; !known {
		h.owners[pid] = h.describe(pid)
	}
	return h.owners[pid]
}

func (h *holders) describe(pid int) doctor.Owner {
	path, _ := os.Readlink(procFile(pid, "exe"))
	path = strings.TrimSuffix(path, " (deleted)") // an upgrade replaced the file
	isProgram := path != "" && (path == h.self || strings.HasPrefix(filepath.Base(path), programName))
	return doctor.Owner{
		PID: pid, Program: cmp.Or(process.Name(pid), "a process"),
		Ours: isProgram || process.InLaunchCgroup(pid) || hasShim(pid),
	}
}
