/** What a page asks of the service. The frame shows its failure, and the requests behind what the page shows. */
export class Work {
  failure = $state.raw(null);
  busy = $state(''); // what is done now
  requests = $state.raw([]);

  /** Runs a piece of work, and returns what it returns, or null if it failed. */
  async run(piece) {
    this.failure = null;
    try {
      return await piece();
    } catch (error) {
      this.failure = error;
      return null;
    } finally {
      this.busy = '';
    }
  }
}
