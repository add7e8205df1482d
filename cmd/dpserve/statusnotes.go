package main

import (
	"fmt"

	"github.com/dpserve/dpserve/actors/msg"
)

// notes are the lines under the tables of status: the index of each application that has one, and every rank whose KV cache or
// events deserve a word.
func notes(apps []msg.AppStatus) []string {
	var out []string
	for i := range apps {
		if a := &apps[i]; a.Index != nil {
			out = append(out, fmt.Sprintf("%s: index %s; identity %s", a.Name, indexText(a.Index), a.Identity))
		}
	}
	for r := range eachRank(apps) {
		if kv := r.rank.KV; kv != nil {
			if text := kvText(kv); text != "" {
				out = append(out, r.name()+": "+text)
			}
		}
	}
	return out
}

// indexText is the size of an index, and what went wrong with it.
func indexText(ix *msg.IndexStatus) string {
	s := fmt.Sprintf("%d blocks, %s of %s", ix.Blocks, mebibytes(ix.Bytes), mebibytes(ix.Cap))
	for _, part := range []struct {
		n    uint64
		what string
	}{{uint64(max(ix.Orphans, 0)), "orphans"}, {ix.Evicted, "evicted"}, {ix.Resyncs, "resyncs"}} {
		if part.n > 0 {
			s += fmt.Sprintf(", %d %s", part.n, part.what)
		}
	}
	return s
}

func mebibytes(n int) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// kvText is what a person should know of a rank's KV cache, "" if all is well.
func kvText(kv *msg.KVStatus) string {
	s := kv.Note
	e := kv.Events
	if e == nil || s != "" && e.State == msg.EventsLive && e.Gaps+e.Dropped == 0 {
		return s
	}
	add := func(text string) {
		if s != "" {
			s += "; "
		}
		s += text
	}
	switch {
	case e.State == msg.EventsSilent && kv.Note == "":
		add(fmt.Sprintf("KV events silent for %.0f s under traffic", e.SilentFor))
	case e.State == msg.EventsPartial:
		add("KV events partial: what it held before is not known")
	case e.State == msg.EventsConnecting:
		add("its KV events are not connected")
	}
	if e.Gaps > 0 {
		add(fmt.Sprintf("%d gaps in its KV events", e.Gaps))
	}
	if e.Dropped > 0 {
		add(fmt.Sprintf("%d KV events dropped", e.Dropped))
	}
	return s
}

// hitRate is a rank's share of cached prompt tokens; "-" while its engine has reported none.
func hitRate(r *msg.RankStatus) string {
	if r.PromptTokens == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", 100*r.HitRate)
}
