package engine

import "github.com/dpserve/dpserve/internal/app"

// Ports is a unit's port block on a node. Offsets, with D = dp_size of a lockstep unit, 1 of an independent
// one: HTTP 0…D−1 · KV PUB D… · KV replay 2D… · side channel 3D… · bootstrap 4D… · meeting 5D. An SGLang
// engine has one bootstrap server and meets on up to 14 ports from 4D+1 on. Rank is the rank's number in the
// unit.
type Ports struct {
	base, size int
	sglang     bool
}

// PortsOf lays out the block that begins at base for a unit of dpSize ranks.
func PortsOf(base, dpSize int) Ports { return Ports{base: base, size: dpSize} }

// Ports is the layout of the block of s.
func (s *Spec) Ports() Ports { return s.portsAt(s.Base) }

func (s *Spec) portsAt(base int) Ports {
	p := PortsOf(base, 1)
	if s.isLockstep() {
		p.size = s.App.DataParallel.DPSize
	}
	p.sglang = s.App.Engine.Kind == app.KindSGLang
	return p
}

// portsOfRankZero is the layout of the block of rank 0's node. Its meeting port tells where the block begins.
func (s *Spec) portsOfRankZero() Ports {
	if !s.spans() || s.NodeRank == 0 {
		return s.Ports()
	}
	return s.portsAt(s.Rank0Port - s.portsAt(0).RPC())
}

// HTTP is the port of a rank's API.
func (p Ports) HTTP(rank int) int { return p.base + rank }

// KV is where a rank's engine publishes its KV events to: the engine dials, its DPServer listens.
func (p Ports) KV(rank int) int { return p.base + p.size + rank }

// Replay is where a rank's engine answers for KV events that were missed.
func (p Ports) Replay(rank int) int { return p.base + 2*p.size + rank }

// SideChannel is where NIXL engines meet, for the rank of its number in the unit.
func (p Ports) SideChannel(rank int) int { return p.base + 3*p.size + rank }

// Bootstrap is where decode engines ask for a prefill rank (mooncake, sglang).
func (p Ports) Bootstrap(rank int) int { return p.base + 4*p.size + rank }

// RPC is where rank 0 of a lockstep unit meets the others.
func (p Ports) RPC() int {
	if p.sglang {
		return p.Bootstrap(0) + 1
	}
	return p.base + 5*p.size
}

// MeetsFirst reports whether the address of rank 0's node must be known before the ranks of the unit on this
// node can be addressed.
func (s *Spec) MeetsFirst() bool {
	return s.App.Engine.Kind == app.KindSGLang && s.spans() && s.NodeRank > 0
}

// apiHost is where an SGLang process listens. Other nodes must reach it if it answers for their ranks, and if
// decode engines ask its bootstrap server.
func (s *Spec) apiHost() string {
	if s.NodeRank == 0 && s.spans() || s.App.Pool == app.PoolPrefill {
		return s.reach()
	}
	return s.host()
}

// sglangMeeting are the offsets, from the meeting port, of the ports that SGLang's first node binds with DP
// attention: rendezvous store, tokenizer, detokenizer, commands, metrics, scheduler, collectives, and the
// handshake of the nodes.
func sglangMeeting() []int { return []int{0, 1, 2, 3, 4, 5, 6, 13} }

// Bind is an address that engines bind.
type Bind struct {
	Host string
	Port int
}

// Meeting is where rank 0 of the unit meets the other ranks, if this node has it. SGLang's prefill engines
// also look for their bootstrap server on this host.
func (s *Spec) Meeting() Bind {
	if s.spans() || s.App.Engine.Kind == app.KindSGLang && s.App.Pool == app.PoolPrefill {
		return Bind{s.reach(), s.Ports().RPC()}
	}
	return Bind{s.host(), s.Ports().RPC()}
}

// Binds lists what the engines of the unit bind on this node, of its block. It is bind-tested before a start
// and verified free after an end. Engines also take ports that the kernel chooses.
func (s *Spec) Binds() []Bind {
	switch s.App.Engine.Kind {
	case app.KindAttach:
		return nil
	case app.KindSGLang:
		return s.sglangBinds()
	case app.KindSim, app.KindVLLM:
	}
	var out []Bind
	p, events := s.Ports(), WantsEvents(s.App)
	for _, i := range s.indices() {
		out = append(out, Bind{s.host(), p.HTTP(i)})
		if events {
			out = append(out, Bind{s.host(), p.Replay(i)})
		}
		if i == 0 && p.size > 1 {
			out = append(out, s.Meeting())
		}
		if s.App.Engine.Kind == app.KindVLLM {
			out = append(out, s.transferBinds(i)...)
		}
	}
	return out
}

// EventBinds lists where DPServers listen for KV events of the engines of the unit on this node.
func (s *Spec) EventBinds() []Bind {
	if s.App.Engine.Kind == app.KindAttach || !WantsEvents(s.App) {
		return nil
	}
	var out []Bind
	for _, i := range s.indices() {
		out = append(out, Bind{s.host(), s.Ports().KV(i)})
	}
	return out
}

// indices are the numbers in the unit of its ranks on this node.
func (s *Spec) indices() []int {
	if !s.isLockstep() {
		return []int{0}
	}
	var out []int
	for _, seat := range s.seats() {
		out = append(out, seat.Rank)
	}
	return out
}

// transferBinds is where a vLLM rank of a pool waits for ranks of the other pool.
func (s *Spec) transferBinds(index int) []Bind {
	d := s.App.Disaggregation
	switch {
	case s.App.Pool == "" || d == nil:
		return nil
	case d.Transfer == app.TransferNIXL, d.Transfer == app.TransferNIXLPush:
		return []Bind{{s.reach(), s.Ports().SideChannel(index)}}
	case d.Transfer == app.TransferMooncake && s.App.Pool == app.PoolPrefill:
		return []Bind{{s.reach(), s.Ports().Bootstrap(index)}}
	}
	return nil
}

func (s *Spec) sglangBinds() []Bind {
	p := s.Ports()
	out := []Bind{{s.apiHost(), p.HTTP(0)}}
	if s.NodeRank == 0 {
		meeting := s.Meeting()
		out = append(out, meeting)
		if s.isLockstep() && s.App.DataParallel.DPSize > 1 {
			for _, offset := range sglangMeeting()[1:] {
				out = append(out, Bind{meeting.Host, meeting.Port + offset})
			}
		}
		if s.App.Pool == app.PoolPrefill {
			out = append(out, Bind{s.apiHost(), p.Bootstrap(0)})
		}
	}
	if WantsEvents(s.App) {
		for _, i := range s.indices() {
			out = append(out, Bind{s.host(), p.Replay(i)})
		}
	}
	return out
}
