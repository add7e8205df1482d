package client_test

import (
	"context"
	"fmt"

	"github.com/dpserve/dpserve/client"
)

// Reserve a place at the worker that has the prompt's prefix in its cache, send the prompt there, and free
// the place.
func ExampleRouterClient_BestWorker() {
	// with a node: client.New("127.0.0.1:8265"), then Router("demo")
	router, stop, err := start(&fakeRouters{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	ctx := context.Background()
	w, err := router.BestWorker(ctx,
		client.BestWorkerRequest{TokenIDs: []uint32{1, 2, 3}, RequestID: "my-request"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("send it to", w.Worker, "where", w.OverlapBlocks, "blocks are cached")
	fmt.Println(router.MarkPrefillComplete(ctx, w.RequestID)) // at the first token
	fmt.Println(router.Free(ctx, w.RequestID))                // at the last
	// Output:
	// send it to 0/1 where 3 blocks are cached
	// <nil>
	// <nil>
}

// Let the router pick, send and account.
func ExampleRouterClient_Generate() {
	router, stop, err := start(&fakeRouters{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	q := client.GenerateRequest{TokenIDs: []uint32{1, 2, 3}, Sampling: map[string]any{"max_tokens": 3}}
	for part, err := range router.Generate(context.Background(), q) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%v %q\n", part.TokenIDs, part.FinishReason)
	}
	// Output:
	// [5 6] ""
	// [7] "stop"
	// [] ""
}
