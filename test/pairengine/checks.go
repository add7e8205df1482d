package pairengine

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
)

// meeting is where the two legs of an attempt find each other, under the transfer's id of it.
type meeting struct {
	engine   *Engine   // of the prefill leg
	life     int       // of that engine
	prompt   string    // of the prefill leg
	params   string    // of its answer
	at       time.Time // of its answer
	prefills int
	decodes  int
	computed chan struct{} // closed when the prompt is computed
	arrived  chan struct{} // closed when the decode leg is there
}

// meet returns the meeting under an id.
func (f *Fleet) meet(id string) *meeting {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.meetings[id]
	if m == nil {
		m = &meeting{computed: make(chan struct{}), arrived: make(chan struct{})}
		f.meetings[id] = m
	}
	return m
}

// sideOf tells which leg of a pair a request is.
func (f *Fleet) sideOf(l *Leg) string {
	if f.Transfer == transfer.SGLangName {
		if len(l.Rooms()) > 0 && !l.isFakeBootstrap() && l.At.Role != Both {
			return l.At.Role
		}
		return Plain
	}
	switch {
	case string(l.Params["do_remote_decode"]) == "true":
		return Prefill
	case string(l.Params["do_remote_prefill"]) == "true":
		return Decode
	}
	return Plain
}

// param is a text among the parameters.
func (l *Leg) param(name string) (text string) {
	_ = json.Unmarshal(l.Params[name], &text)
	return text
}

// meetingID is the id under which the legs of the leg's attempt meet.
func (l *Leg) meetingID() string {
	switch l.At.fleet.Transfer {
	case transfer.NixlPushName:
		return l.Path + " " + l.ID()
	case transfer.MooncakeName:
		return l.param("transfer_id")
	case transfer.SGLangName:
		return fmt.Sprint(l.Rooms())
	}
	return l.param("remote_request_id")
}

// check looks at each field of a leg. For a decode leg it returns the prompt whose blocks the engine gets
// now, if that is known already.
func (f *Fleet) check(l *Leg) (prompt string, isKnown bool) {
	f.checkMembers(l)
	switch l.Side {
	case Prefill:
		f.checkPrefill(l)
	case Decode:
		if f.isPull() {
			return f.checkPull(l)
		}
		return "", f.checkDecode(l)
	case Plain:
		if l.Fields["kv_transfer_params"] != nil && l.Params["do_remote_decode"] == nil {
			f.fault(l, "a request without a partner has transfer parameters")
		}
	}
	return "", false
}

func (f *Fleet) isPull() bool {
	return f.Transfer == transfer.NixlName || f.Transfer == transfer.SimName
}

// checkMembers looks for members that stand twice, and for those that no engine of this transfer may get.
func (f *Fleet) checkMembers(l *Leg) {
	seen := map[string]bool{}
	err := openai.Members(l.Body, func(key []byte, _, _ openai.Span) error {
		if seen[string(key)] {
			f.fault(l, "member %s stands twice", key)
		}
		seen[string(key)] = true
		return nil
	})
	if err != nil {
		f.fault(l, "%v", err)
	}
	strangers := []string{"ec_transfer_params", "disagg_spec", "transfer_id", "remote_host"}
	if f.Transfer != transfer.SGLangName {
		strangers = append(strangers, "bootstrap_host", "bootstrap_port", "bootstrap_room",
			"disagg_prefill_dp_rank")
	}
	for _, name := range strangers {
		if seen[name] {
			f.fault(l, "member %s", name)
		}
	}
	if l.At.Ranks > 1 && (l.Rank() < 0 || l.Rank() >= l.At.Ranks) {
		f.fault(l, "rank %d of %d", l.Rank(), l.At.Ranks)
	}
}

// checkPrefill checks a prefill leg, and opens its meeting.
func (f *Fleet) checkPrefill(l *Leg) {
	if f.Transfer == transfer.SGLangName {
		f.checkRooms(l)
	} else {
		if l.isSet("stream") || l.tokens() != 1 || l.number("max_tokens", 1) != 1 {
			f.fault(l, "the leg is not bound to one token")
		}
		for _, name := range []string{"stream_options", "min_tokens", "min_completion_tokens"} {
			if l.Fields[name] != nil {
				f.fault(l, "the leg has %s", name)
			}
		}
		if string(l.Params["do_remote_prefill"]) != "false" {
			f.fault(l, "do_remote_prefill")
		}
		if l.number("n", 1) > 1 || len(l.prompts(l.Prompt)) > 1 {
			f.fault(l, "several choices or prompts: the engine returns the parameters of one")
		}
	}
	if f.Transfer == transfer.MooncakeName && (!l.isSet("ignore_eos") || l.Fields["stop"] != nil) {
		f.fault(l, "the leg may end by a stop, which frees its blocks")
	}
	if f.isPull() {
		return // its id is made with its answer
	}
	m := f.meet(l.meetingID())
	f.mu.Lock()
	m.prefills++
	again := m.prefills > 1
	m.engine, m.life, m.prompt = l.At, l.life, l.Prompt
	f.mu.Unlock()
	if again {
		f.fault(l, "a second prefill leg under %s", l.meetingID())
	}
}

// checkRooms checks SGLang's members of either leg.
func (f *Fleet) checkRooms(l *Leg) {
	rooms := l.Rooms()
	if len(rooms) != len(l.prompts(l.Prompt)) {
		f.fault(l, "%d rooms for %d prompts", len(rooms), len(l.prompts(l.Prompt)))
	}
	for i, room := range rooms {
		if slices.Contains(rooms[:i], room) {
			f.fault(l, "room %d twice: both schedulers end", room)
		}
	}
	if l.Fields["bootstrap_host"] == nil || l.Fields["bootstrap_port"] == nil {
		f.fault(l, "bootstrap host or port is missing")
	}
	for _, e := range f.all() {
		host, port := hostPort(e.Addr)
		if e.Role != Prefill || !strings.Contains(string(l.Fields["bootstrap_host"]), host) ||
			!strings.Contains(string(l.Fields["bootstrap_port"]), port) || e.Ranks < 2 {
			continue
		}
		want := l.number("disagg_prefill_dp_rank", -1)
		if l.Side == Prefill && l.Rank() != want {
			f.fault(l, "the leg is for rank %d, and disagg_prefill_dp_rank says %d", l.Rank(), want)
		}
		for _, room := range rooms {
			if int(room%uint64(e.Ranks)) != want {
				f.fault(l, "room %d is not of rank %d", room, want)
			}
		}
	}
}

func (f *Fleet) all() []*Engine {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.engines)
}

func hostPort(addr string) (host, port string) {
	i := strings.LastIndexByte(addr, ':')
	return addr[:i], addr[i+1:]
}

// checkPull checks the parameters of a decode leg that reads its partner's blocks, and returns the prompt of
// what the blocks hold.
func (f *Fleet) checkPull(l *Leg) (prompt string, isKnown bool) {
	f.mu.Lock()
	m := f.meetings[l.meetingID()]
	reads := 0
	if m != nil {
		m.decodes++
		reads = m.decodes
	}
	f.mu.Unlock()
	if m == nil {
		f.fault(l, "parameters that no engine gave: the engine ends")
		return "", false
	}
	if raw := string(l.Fields["kv_transfer_params"]); raw != m.params {
		f.fault(l, "the parameters are not the bytes of the prefill's answer, which were\n%s", m.params)
	}
	if life, isUp, died := m.engine.lives(); life != m.life || !isUp {
		if l.Began.Sub(died) > time.Second {
			f.fault(l, "parameters of a prefill engine that ended %s before", l.Began.Sub(died))
		}
		return "", false
	}
	switch {
	case reads > 1:
		f.fault(l, "parameters that were read before: the text is wrong")
	case l.Began.Sub(m.at) > f.Lease:
		f.fault(l, "parameters %s after their prefill: the text is wrong", l.Began.Sub(m.at))
	case m.prompt != l.Prompt:
		f.fault(l, "parameters of another prompt: the text is wrong")
	default:
		return m.prompt, true
	}
	return "other blocks of " + m.prompt, true
}

// checkDecode checks a decode leg to which its partner pushes. It is not good if the engine finds no partner.
func (f *Fleet) checkDecode(l *Leg) (isGood bool) {
	isGood = true
	switch f.Transfer {
	case transfer.SGLangName:
		f.checkRooms(l)
	case transfer.NixlPushName:
		for _, name := range strings.Fields("remote_engine_id remote_host remote_port tp_size pp_size") {
			if l.Params[name] == nil {
				f.fault(l, "%s is missing: the engine ends", name)
			}
		}
		if l.Params["remote_block_ids"] != nil {
			f.fault(l, "block ids before the blocks are there")
		}
		if l.param("remote_request_id") == "" || l.ID() == "" {
			f.fault(l, "no request id: the engine ends")
		}
		if f.named(l.param("remote_engine_id")) == nil {
			f.fault(l, "no engine is %s", l.param("remote_engine_id"))
		}
	case transfer.MooncakeName:
		if l.param("transfer_id") == "" || l.param("remote_bootstrap_addr") == "" {
			f.fault(l, "a key is missing: the engine waits for ever")
		}
		isGood = f.checkEngineID(l)
	}
	m := f.meet(l.meetingID())
	f.mu.Lock()
	m.decodes++
	again := m.decodes > 1
	if !again {
		close(m.arrived)
	}
	f.mu.Unlock()
	if again {
		f.fault(l, "a second decode leg under %s", l.meetingID())
	}
	return isGood
}

// lateNews is how long after an engine's restart legs may still name its life before: nobody tells dpserve of
// the restart of an engine that it has not started.
const lateNews = 3 * time.Second

// checkEngineID looks for the engine that a mooncake leg names. Of an engine that has ended the decode engine
// gets nothing.
func (f *Fleet) checkEngineID(l *Leg) (isUp bool) {
	named := l.param("remote_engine_id")
	for _, e := range f.all() {
		for rank := range max(1, e.Ranks) {
			if e.engineID(rank) == named {
				_, isUp, _ := e.lives()
				return isUp
			}
		}
		if _, _, died := e.lives(); strings.HasPrefix(named, e.Name+"-") && l.Began.Sub(died) < lateNews {
			return false
		}
	}
	f.fault(l, "no engine is %s", named)
	return false
}

// answerPrefill answers a prefill leg.
func (l *Leg) answerPrefill() {
	f := l.At.fleet
	if f.isPull() {
		f.mu.Lock()
		f.number++
		id := fmt.Sprintf("cmpl-%s-0-%08x", l.ID(), f.number)
		params := pullParams(f.number, l, id)
		f.mu.Unlock()
		if f.Params != nil {
			params = f.Params(params)
		}
		m := f.meet(id)
		f.mu.Lock()
		m.engine, m.life, m.prompt, m.params, m.at = l.At, l.life, l.Prompt, params, time.Now()
		f.mu.Unlock()
		l.answerWhole(l.Prompt, params)
		return
	}
	m := f.meet(l.meetingID())
	f.mu.Lock()
	if m.prefills == 1 {
		close(m.computed)
	}
	f.mu.Unlock()
	switch f.Transfer {
	case transfer.SGLangName: // its answer is complete when the decode engine has the blocks
		if !l.StallUntil(m.arrived) {
			l.Answer(l.Prompt)
		}
	case transfer.NixlPushName:
		l.answerWhole(l.Prompt, `{"do_remote_prefill":true,"transfer_mode":"push","remote_engine_id":"`+
			l.At.engineID(0)+`","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"pp_size":1}`)
	default:
		l.answerWhole(l.Prompt, "")
	}
}

// pullParams are the parameters of an answer, with numbers, texts and fields that only the engines know, and
// with spaces.
func pullParams(number int, l *Leg, id string) string {
	return fmt.Sprintf(`{"do_remote_prefill":true, "do_remote_decode":false,"remote_block_ids":[[%d, %d]],`+
		`"remote_engine_id":"%s-life-%d","remote_request_id":%q,"remote_host":"127.0.0.1",`+
		`"remote_port":15600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":%d,`+
		`"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":%d,`+
		`"x-%s":{"big":12345678901234567890,"text":"\u00e9\/","list":[1, "2" ,null]}}`,
		number, number+1, l.At.Name, l.life, id, promptTokens(l.Prompt), l.At.remember(l.Prompt),
		l.At.fleet.Transfer)
}

// answerDecode answers a decode leg. prompt is what a pulling engine has read; one that is pushed to waits
// for its partner without an end.
func (l *Leg) answerDecode(prompt string) {
	f := l.At.fleet
	if !f.isPull() {
		m := f.meet(l.meetingID())
		if l.StallUntil(m.computed) {
			return
		}
		f.mu.Lock()
		prompt = m.prompt
		f.mu.Unlock()
		if prompt != l.Prompt {
			f.fault(l, "another prompt than the prefill leg's: the text is wrong")
		}
	}
	l.Answer(prompt)
}
