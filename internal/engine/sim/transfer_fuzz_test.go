package sim

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

func sideFrame(body string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// Whatever a stranger sends to a side channel is refused or answered: messages that are read can be written,
// and no question stops the engine.
func FuzzSideChannel(f *testing.F) {
	for _, body := range []string{
		`{"op":"meet"}`, `{"op":"read","engine":"e","request":"r","blocks":[1,2,-3,2147483647]}`,
		`{"op":"heartbeat","engine":"e"}`, `{"op":"free","engine":"e","request":"r"}`, `{"kv":[1,2,3]}`, `[]`,
	} {
		f.Add(sideFrame(body))
	}
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 'x'})
	c := pairConfig(RoleBoth)
	c.Transfer.EngineID = "e"
	s, err := New(c)
	require.NoError(f, err)
	quit := make(chan struct{})
	close(quit)
	side := &sideServer{ex: s.ranks[0].exchange, quit: quit}
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := readSide(bytes.NewReader(raw))
		if err != nil {
			return
		}
		_ = m.blockKV()
		_ = side.answer(&m, quit)
		s.ranks[0].turn(nil)
		assert.False(t, s.dead.Load())
		here, there := net.Pipe()
		defer func() { _, _ = here.Close(), there.Close() }()
		go func() { _ = writeSide(here, &m) }()
		again, err := readSide(there)
		require.NoError(t, err)
		assert.Equal(t, mustMarshal(m), mustMarshal(again))
	})
}

// Parameters of any form are read without a panic; what they do to the engine is decided later.
func FuzzLegParams(f *testing.F) {
	for _, raw := range []string{
		prefillParams, `{"do_remote_prefill":true}`, `{"remote_block_ids":[[1,2]],"remote_port":"5"}`,
		`{"do_remote_prefill":1,"remote_block_ids":[],"prompt_token_ids":[1]}`, `null`, `[]`,
	} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if !json.Valid(raw) {
			return
		}
		body := &fields{members: map[string]json.RawMessage{"kv_transfer_params": bytes.TrimSpace(raw)}}
		p := body.transferParams()
		_, _ = p.blocks()
		_, _ = p.lacks(pullKeys())
		_, _ = p.wantsLease(), p.address()
		if ids := p.promptIDs(body); ids != nil {
			assert.True(t, p.wantsBlocks())
		}
	})
}

func FuzzTransferConfig(f *testing.F) {
	f.Add(`{"kv_connector":"NixlConnector","kv_role":"kv_both",` +
		`"kv_connector_extra_config":{"kv_lease_duration":3}}`)
	f.Add(`{"kv_connector":"NixlConnector","kv_role":"kv_producer","engine_id":null}`)
	f.Fuzz(func(t *testing.T, text string) {
		k := defaultKVTransfer()
		if err := k.parse(text); err != nil {
			return
		}
		require.NoError(t, k.validate())
		assert.Positive(t, k.lease())
	})
}

func TestTransferConfig(t *testing.T) {
	for text, want := range map[string]string{
		`{"kv_connector":"NixlConnector"}`:                        "want kv_producer, kv_consumer or kv_both",
		`{"kv_connector":"P2pNcclConnector","kv_role":"kv_both"}`: "the simulated engine has NixlConnector",
		`{"kv_conector":"NixlConnector"}`:                         `unknown field "kv_conector"`,
		`{"kv_load_failure_policy":"retry"}`:                      "want fail or recompute",
		`{"kv_connector_extra_config":{"kv_lease_duration":0}}`:   "want seconds above 0",
		`{"kv_connector_extra_config":3}`:                         "kv_connector_extra_config",
		`{"engine_id":true}`:                                      "cannot unmarshal",
	} {
		_, _, err := ParseFlags([]string{"--kv-transfer-config", text})
		require.ErrorContains(t, err, want, text)
	}
	c, _, err := ParseFlags([]string{
		"--kv-transfer-config", `{"kv_connector":"NixlPullConnector","kv_role":"kv_consumer",` +
			`"engine_id":"e","kv_buffer_device":"cpu","kv_load_failure_policy":"recompute",` +
			`"kv_connector_extra_config":` +
			`{"kv_lease_duration":120,"backends":["UCX"]}}`,
		"--sim-transfer-gbps", "12.5", "--sim-transfer-token-bytes", "1000", "--sim-transfer-first-contact-s",
		"0", "--sim-transfer-handshake-s", "2",
		"--sim-fail", "transfer-lease=0.5@3", "--sim-fail", "transfer-slow=9",
	})
	require.NoError(t, err)
	k := c.Transfer
	assert.Equal(t, ConnectorNixl, k.Connector)
	assert.Equal(t, "e", k.EngineID)
	assert.True(t, k.Recompute)
	assert.InDelta(t, 120, k.lease().Seconds(), 0)
	assert.Equal(t, [4]float64{12.5, 1000, 0, 2}, [4]float64{
		k.GBps, float64(k.TokenBytes), k.FirstContact.Seconds(), k.HandshakeMax.Seconds(),
	})
	assert.InDelta(t, 0.5, c.Schedule[0].Fault.LeaseS, 0)
	assert.InDelta(t, 9, c.Schedule[1].Fault.Factor, 0)

	t.Setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
	t.Setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
	require.NoError(t, transferFromEnv(&c.Transfer))
	assert.Equal(t, "10.0.0.1:5603", c.sideAddr(3))
	t.Setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "many")
	assert.ErrorContains(t, transferFromEnv(&c.Transfer), "want a port")
}

// Blocks travel whole.
func TestBlocksOnTheWire(t *testing.T) {
	kv := []em.BlockKV{{Sum: 1<<64 - 1, Tokens: 32, PromptSum: 7, PromptTokens: 3}, {}}
	var m sideMessage
	m.setKV(kv)
	here, there := net.Pipe()
	defer func() { _, _ = here.Close(), there.Close() }()
	go func() { _ = writeSide(here, &m) }()
	got, err := readSide(there)
	require.NoError(t, err)
	assert.Equal(t, kv, got.blockKV())
	assert.Equal(t, []int32{0, 4}, poolBlocks(namedBlocks([]int32{0, 4})))
	assert.Nil(t, namedBlocks(nil))
}
